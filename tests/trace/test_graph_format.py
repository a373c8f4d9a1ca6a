"""A trace as plain values: invalid traces are rejected, and JSON keeps everything."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import CallPhase
from memfit.estimators.trace.graph_format import Array, Call, Node, Trace, from_json, to_json
from tests.fuzz.readers import TRACE as SMALL

PATH = Path("a.trace.json")
DTYPES = st.sampled_from(("BF16", "F32", "I32", "U32", "BOOL"))
ROLES = st.sampled_from(("weight", "cache", "tokens", "constant", "computed"))
SHAPES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
ARRAYS = st.builds(Array, SHAPES, DTYPES, ROLES, st.text(max_size=9))
INTEGERS = st.lists(st.integers(-9, 9), max_size=3).map(tuple)
ARGUMENTS = st.one_of(st.booleans(), st.integers(), st.text(max_size=5), INTEGERS)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    arrays = tuple(draw(st.lists(ARRAYS, min_size=1, max_size=6)))
    positions = st.lists(st.integers(0, len(arrays) - 1), max_size=3).map(tuple)
    arguments = st.lists(ARGUMENTS, max_size=2).map(tuple)
    nodes = st.lists(st.builds(Node, st.text(max_size=9), positions, positions, arguments))
    phases: tuple[CallPhase, ...] = ("first_chunk", "last_chunk", "last_token", "decode")
    phase = draw(st.sampled_from(phases))
    return Call(phase, 3, 5, arrays, tuple(draw(nodes)), draw(positions), draw(positions))


TRACES = st.builds(
    Trace,
    model_type=st.text(max_size=9),
    backend=st.sampled_from(("cpu", "metal", "cuda")),
    versions=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    weights=st.dictionaries(st.text(max_size=5), st.integers(0, 2**50), max_size=3),
    calls=st.lists(calls(), max_size=3).map(tuple),
)


@given(TRACES)
def test_json_keeps_every_part_of_a_trace(trace: Trace) -> None:
    assert from_json(to_json(trace).encode(), PATH) == trace


def test_json_has_one_array_or_node_per_line() -> None:
    lines = to_json(SMALL).splitlines()
    assert '["Square", [0], [1], []]]}' in lines
    assert '[[2], "BF16", "weight", "norm.weight"],' in lines


def _changed(path: list[Any], value: Any) -> str:
    content = json.loads(to_json(SMALL))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], "memfit.trace/99"),
        (["calls"], 3),
        (["calls", 0, "phase"], "dream"),
        (["calls", 0, "held"], [2]),
        (["calls", 0, "held"], [-1]),
        (["calls", 0, "nodes", 0, 1], [7]),
        (["calls", 0, "nodes", 0, 2], [0.5]),
        (["calls", 0, "arrays", 0, 0], [-2]),
        (["calls", 0, "arrays", 0, 0], [True]),
        (["calls", 0, "arrays", 0, 1], "BF17"),
        (["calls", 0, "arrays", 0, 2], "ghost"),
        (["calls", 0, "arrays", 0, 3], 1),
        (["calls", 0, "arrays", 0], [[2]]),
        (["calls", 0, "nodes", 0, 3], [None]),
        (["calls", 0, "tokens"], "1"),
        (["calls", 0, "extra"], 1),
        (["weights", "norm.weight"], "4"),
        (["mlx_version"], "31"),
        (["extra"], 1),
    ],
)
def test_a_damaged_trace_is_rejected(path: list[Any], value: Any) -> None:
    with pytest.raises(InputError):
        from_json(_changed(path, value).encode(), PATH)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "[" * 100_000])
def test_text_that_is_not_a_trace_is_rejected(text: str) -> None:
    with pytest.raises(InputError):
        from_json(text.encode(), PATH)


def test_calls_are_found_by_phase_and_arrays_by_role() -> None:
    decode = SMALL.call("decode")
    assert decode is not None
    assert decode.of_role("weight") == (0,)
    assert SMALL.call("last_chunk") is None
