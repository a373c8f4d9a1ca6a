"""For any bytes, a reader gives a result or a one-line error."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import READERS, outcome
from tests.selection import examples

# Readers that write their bytes to a file share one directory for all examples.
SHARED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=examples(60),
)
# A reference to missing files is rejected with their names: the seed is read that far.
REJECTED_SEEDS = {
    "index": "missing",
    "manifest": "no such file",
    "lock": "",
    "adapter": "",
    "pack": "no such file",
}

NAMES = sorted(READERS)


def assert_one_line(error: str | None) -> None:
    # Each mistake in a policy is one line; the message joins them.
    assert error is None or (error.isprintable() and 0 < len(error) < 20_000)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_accepted(name: str, tmp_path: Path) -> None:
    error = outcome(READERS[name], READERS[name].seed, tmp_path)
    if name in REJECTED_SEEDS and error:
        assert REJECTED_SEEDS[name] in error
    else:
        assert error is None


@pytest.mark.parametrize("name", NAMES)
@SHARED
@given(content=st.binary(max_size=300))
def test_arbitrary_bytes(name: str, tmp_path: Path, content: bytes) -> None:
    assert_one_line(outcome(READERS[name], content, tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_truncations_of_the_seed(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    for end in range(0, len(reader.seed), len(reader.seed) // 150 + 1):
        assert_one_line(outcome(reader, reader.seed[:end], tmp_path))


@pytest.mark.parametrize("name", NAMES)
@SHARED
@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), min_size=1, max_size=8))
def test_flipped_bits_of_the_seed(name: str, tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(READERS[name].seed)
    for position, bit in flips:
        content[position % len(content)] ^= 1 << bit
    assert_one_line(outcome(READERS[name], bytes(content), tmp_path))


@pytest.mark.parametrize("name", NAMES)
@SHARED
@given(
    position=st.integers(0, 2**20),
    length=st.integers(0, 16),
    put=st.one_of(
        st.binary(max_size=16),
        st.sampled_from(
            [b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"1e999", b"NaN", b"{", b"[", b'"']
        ),
    ),
)
def test_replaced_parts_of_the_seed(
    name: str, tmp_path: Path, position: int, length: int, put: bytes
) -> None:
    seed = READERS[name].seed
    start = position % len(seed)
    content = seed[:start] + put + seed[start + length :]
    assert_one_line(outcome(READERS[name], content, tmp_path))
