"""A JSON object is the same whether it is parsed at once or member by member."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.reading.json_members import object_members

LONG = b" " * 2**19  # without meaning in JSON, but the text is no longer short

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=4)


def members(text: bytes, inside: str | None = None) -> list[tuple[str, Any]]:
    return list(
        object_members(text, "here", error=CheckpointError, max_values=10**6, inside=inside)
    )


@given(objects)
def test_members_equal_those_of_the_parsed_object(value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    assert members(text) == members(text + LONG) == list(value.items())


@given(objects, values)
def test_nested_members_equal_those_of_the_inner_object(outer: dict[str, Any], inner: Any) -> None:
    text = json.dumps({**outer, "map": inner}).encode()
    expected = list(inner.items()) if isinstance(inner, dict) else []
    assert members(text, "map") == members(text + LONG, "map") == expected


@given(objects, st.data())
def test_text_with_an_extra_byte_is_rejected_the_same_way(
    value: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value).encode()
    at = data.draw(st.integers(0, len(text)))
    broken = text[:at] + b"\xff" + text[at:]
    faults = []
    for given_text in (broken, broken + LONG):
        with pytest.raises(CheckpointError) as fault:
            members(given_text)
        faults.append(str(fault.value))
    assert faults[0] == faults[1]


@pytest.mark.parametrize("end", [b"", LONG], ids=["short", "long"])
def test_a_repeated_name_is_yielded_again(end: bytes) -> None:
    assert members(b'{"a": 1, "b": 2, "a": 3}' + end) == [("a", 1), ("b", 2), ("a", 3)]
