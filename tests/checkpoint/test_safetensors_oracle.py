"""The reader of headers accepts and refuses what the reference does, the safetensors package."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.dtypes import BITS
from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.checkpoint.safetensors import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    read_header,
)
from tests.sparse import header_of

safetensors = pytest.importorskip("safetensors", reason="the oracle is the safetensors package")

Read = dict[str, tuple[str, tuple[int, ...], int]] | None


def file_of(header: bytes, data_bytes: int, length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + bytes(data_bytes)


def by_reference(content: bytes) -> Read:
    try:
        tensors = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (t["dtype"], tuple(t["shape"]), len(t["data"])) for name, t in tensors}


def by_memfit(content: bytes, folder: Path) -> Read:
    (folder / "m").write_bytes(content)
    try:
        header = read_header(folder / "m")
    except CheckpointError:
        return None
    return {t.name: (t.dtype, t.shape, t.nbytes) for t in header.tensors}


SHAPES = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from([name for name, bits in BITS.items() if bits % 8 == 0]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=5,
)
SMALL = st.integers(-1, 40) | st.sampled_from([True, 2.5, None, "8", 2**64, 10**30])


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Valid files, and such with one mistake: a span, shape, type or length, or bytes exchanged."""
    text, data_bytes = header_of(draw(SHAPES))
    entries: dict[str, Any] = json.loads(text)
    names = draw(st.permutations(sorted(entries)))
    entries = {name: entries[name] for name in names}
    entry = entries[names[0]]
    mistake = draw(
        st.sampled_from(["", "span", "shape", "dtype", "key", "data", "length", "bytes"])
    )
    if mistake == "span":
        entry["data_offsets"][draw(st.integers(0, 1))] = draw(SMALL)
    elif mistake == "shape":
        entry["shape"] = [*entry["shape"], draw(SMALL)]
    elif mistake == "dtype":
        entry["dtype"] = draw(st.sampled_from([*BITS, "F12", "f32", None, 1]))
    elif mistake == "key":
        del entry[draw(st.sampled_from(sorted(entry)))]
    elif mistake == "data":
        data_bytes = max(0, data_bytes + draw(st.sampled_from([-1, 1, 8])))
    text = json.dumps(entries).encode()
    if mistake == "bytes":
        place = draw(st.integers(0, len(text) - 1))
        text = text[:place] + draw(st.binary(min_size=1, max_size=1)) + text[place + 1 :]
    length = draw(st.integers(0, len(text) + 9)) if mistake == "length" else None
    return file_of(text, data_bytes, length)


@given(files())
def test_a_file_is_read_or_refused_as_by_the_reference(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    reference = by_reference(content)
    found = by_memfit(content, tmp_path_factory.getbasetemp())
    # One exchanged byte can give two tensors the same name, of which the reference keeps the last.
    if found != reference:
        text = content[8 : 8 + int.from_bytes(content[:8], "little")]
        pairs = json.loads(text, object_pairs_hook=list)
        assert found is None
        assert len({name for name, _ in pairs}) < len(pairs)


@pytest.mark.parametrize("dtype", BITS)
def test_both_know_the_same_types(tmp_path: Path, dtype: str) -> None:
    header, data_bytes = header_of({"a": (dtype, (8,))})
    content = file_of(header, data_bytes)
    assert by_memfit(content, tmp_path) == by_reference(content) is not None


SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
REFUSED_BY_BOTH = {
    "overlapping offsets": (json.dumps({"a": SPAN, "b": {**SPAN, "data_offsets": [4, 12]}}), 12),
    "a hole": (json.dumps({"a": SPAN, "b": {**SPAN, "data_offsets": [9, 17]}}), 17),
    "a hole at the end": (json.dumps({"a": SPAN}), 9),
    "data cut short": (json.dumps({"a": SPAN}), 7),
    "another size than the shape's": (json.dumps({"a": {**SPAN, "shape": [3]}}), 8),
    "sizes that overflow": (json.dumps({"a": {**SPAN, "shape": [2**62, 2**62]}}), 8),
    "an unknown type": (json.dumps({"a": {**SPAN, "dtype": "F12"}}), 8),
    "the same key twice": (
        '{"a":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        0,
    ),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0),
    "metadata of numbers": ('{"__metadata__":{"a":1}}', 0),
    "a byte order mark": ("\ufeff{}", 0),
    "half a surrogate pair": (json.dumps({"\ud800": SPAN}), 8),
    "part of a byte": (json.dumps({"a": {**SPAN, "dtype": "F4", "shape": [3]}}), 2),
}


@pytest.mark.parametrize("fault", REFUSED_BY_BOTH)
def test_a_damaged_file_is_refused_by_both(tmp_path: Path, fault: str) -> None:
    text, data_bytes = REFUSED_BY_BOTH[fault]
    content = file_of(text.encode(), data_bytes)
    assert by_reference(content) is None
    assert by_memfit(content, tmp_path) is None


@pytest.mark.parametrize("length", [0, 50, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_impossible_length_is_refused_by_both(tmp_path: Path, length: int) -> None:
    content = file_of(b"{}", 0, length)
    assert by_reference(content) is None
    assert by_memfit(content, tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        # Of two tensors with one name the reference silently keeps the last.
        f'{{"a":{json.dumps(SPAN)},"a":{json.dumps(SPAN)}}}',
        '{"a":["F32",[2],[0,8]]}',
        json.dumps({"a" * (MAX_NAME_BYTES + 1): SPAN}),
        json.dumps({"a": {**SPAN, "shape": [2] + [1] * MAX_DIMENSIONS}}),
    ],
    ids=["a name twice", "a list for a tensor", "a long name", "many dimensions"],
)
def test_memfit_refuses_four_things_that_the_reference_takes(tmp_path: Path, text: str) -> None:
    content = file_of(text.encode(), 8)
    assert by_reference(content) is not None
    assert by_memfit(content, tmp_path) is None
