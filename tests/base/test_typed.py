"""What is wrong with a value is said with the file, the key and the value that is there."""

from typing import Any

import pytest
from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.section import Reading, to_record
from memfit.estimators.base.units import Count, NonEmpty, Sha256
from memfit.estimators.base.workload import Workload


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    """A part."""

    counts: NonEmpty[Count]
    by_name: dict[str, Count] = {}


class Outer(Struct, frozen=True, forbid_unknown_fields=True, tag_field="schema", tag="test/1"):
    """A document."""

    parts: tuple[Inner, ...] = ()
    digest: Sha256 = "0" * 64
    work: Workload = Workload(prompt_tokens=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected a mapping"),
        ({"parts": []}, "schema: expected test/1"),
        ({"parts": 3}, "parts: expected a list, got 3"),
        ({"parts": [{}]}, "parts[0].counts: missing"),
        ({"parts": [{"counts": [1], "x\n": 2}]}, "parts[0].x\\n: unknown key"),
        ({"parts": [{"counts": []}]}, "parts[0].counts: expected a list of length >= 1, got []"),
        ({"parts": [{"counts": [1, -1]}]}, "parts[0].counts[1]: expected an integer >= 0, got -1"),
        ({"parts": [{"counts": [True]}]}, "parts[0].counts[0]: expected an integer, got True"),
        ({"parts": [{"counts": [1], "by_name": {"a": "b"}}]}, "parts[0].by_name: expected"),
        ({"digest": "0" * 64 + "\n"}, "digest: expected a string of length <= 64"),
        ({"work": {"prompt_tokens": 0}}, "work.prompt_tokens: expected an integer >= 1, got 0"),
        ({"work": {"prompt_tokens": 1, "kv_bits": 7}}, "KV bits 7: MLX quantises to"),
    ],
)
def test_an_error_names_the_file_the_key_and_the_value(value: Any, message: str) -> None:
    whole = {"schema": "test/1", **value} if isinstance(value, dict) else value
    if message.startswith("schema"):
        whole = value
    with pytest.raises(InputError) as error:
        to_record(Outer, whole, Reading("a.json"))
    assert str(error.value).startswith(f"a.json: {message}")


def test_a_record_is_read_with_its_defaults() -> None:
    found = to_record(Outer, {"schema": "test/1", "parts": [{"counts": [1]}]}, Reading("a.json"))
    assert found == Outer(parts=(Inner((1,)),))
