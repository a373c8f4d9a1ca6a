"""A recorded graph as plain values: what a call computes, and what remains when it returns.

Nothing here needs MLX. A trace is written to JSON and read again, so that one machine can record
it and another can use it.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from msgspec import Struct, to_builtins

from memfit.estimators.base import dtypes
from memfit.estimators.base.files import short
from memfit.estimators.base.reading.section import json_section, to_record
from memfit.estimators.base.units import Bytes, Count
from memfit.estimators.base.workload import CallPhase
from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.versions import MLX_VERSION

# weight: a parameter; cache: held by a cache when the call begins; tokens: the call's input;
# constant: made by the class outside of any parameter; computed: an output of a node.
Role = Literal["weight", "cache", "tokens", "constant", "computed"]
SCHEMA = "memfit.trace/1"
MAX_TRACE_VALUES = 20_000_000  # the traces of models have up to a million

Argument = bool | int | float | str | tuple[int, ...]


class Array(NamedTuple):
    shape: tuple[Count, ...]
    dtype: str
    """As safetensors spells it, a key of `dtypes.BITS`."""
    role: Role = "computed"
    name: str = ""
    """A weight's path, an attribute of a cache ("3.keys": of the fourth cache) or empty."""

    @property
    def size(self) -> int:
        """Elements.

        >>> Array((2, 3), "BF16").size
        6
        """
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, before any allocator rounds them.

        >>> Array((2, 3), "BF16").nbytes
        12
        """
        return dtypes.nbytes(self.size, self.dtype)


class Node(NamedTuple):
    """One primitive of MLX."""

    name: str
    """MLX's name, "Compiled" for what mx.compile fuses, the kernel's name for a custom kernel."""
    inputs: tuple[Count, ...]
    """Positions in the call's arrays, as are the outputs."""
    outputs: tuple[Count, ...]
    arguments: tuple[Argument, ...] = ()
    """The primitive's state as MLX exports it."""


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the model by mlx-lm's loop, up to what it evaluates."""

    phase: CallPhase
    """The place of the call in a run: mlx/call_plan.py."""
    tokens: Count
    """Of each sequence."""
    position: Count
    """Tokens in the cache when the call begins."""
    arrays: tuple[Array, ...]
    nodes: tuple[Node, ...]
    """Depth-first from the evaluated arrays: a node comes after those that make its inputs."""
    evaluated: tuple[Count, ...]
    """Positions of the arrays passed to mx.eval, in its order.

    After a chunk of the prompt the states of the caches, after every other call the sampled token
    and the log probabilities.
    """
    held: tuple[Count, ...]
    """Positions of the arrays that Python refers to when the call returns.

    The states of the caches and what was sampled. The call frees the other arrays of the caches.
    """

    def of_role(self, role: Role) -> tuple[int, ...]:
        """Return the positions of the arrays of a role."""
        return tuple(i for i, array in enumerate(self.arrays) if array.role == role)


class Trace(Struct, frozen=True, tag_field="schema", tag=SCHEMA, forbid_unknown_fields=True):
    """The calls of one workload."""

    model_type: str
    backend: Backend
    """The backend that would run the graphs: its fused kernels are one node each."""
    versions: Mapping[str, str]
    """The versions of MLX and mlx-lm that recorded the graphs."""
    weights: Mapping[str, Bytes]
    """Bytes of every parameter by path, also of those that no call uses."""
    calls: tuple[Call, ...]
    """In the order of the run; those that cannot hold its peak are left out."""
    mlx_version: tuple[Count, ...] = MLX_VERSION
    """The version of MLX that sets the rules of the graphs."""

    def call(self, phase: CallPhase) -> Call | None:
        """Return the call of a phase, None when the workload has none."""
        return next((call for call in self.calls if call.phase == phase), None)


def to_json(trace: Trace) -> str:
    """Return a trace as JSON, one array or node per line so that a diff can be read."""
    content = to_builtins(trace)
    calls = content.pop("calls")
    # Without its last brace, so that the calls can follow line by line.
    lines = [json.dumps(content)[:-1] + ', "calls": [']
    lines.append(",\n".join(_call_json(call) for call in calls))
    return "\n".join(lines) + "\n]}\n"


def _call_json(call: dict[str, Any]) -> str:
    arrays, nodes = (",\n".join(map(json.dumps, call.pop(key))) for key in ("arrays", "nodes"))
    head = json.dumps(call)[:-1]
    return f'{head},\n"arrays": [\n{arrays}],\n"nodes": [\n{nodes}]}}'


def from_json(content: bytes, path: PurePath) -> Trace:
    """Return the trace that `to_json` wrote; ``path`` is its file.

    Raises:
        InputError: when the content is not such a trace.
    """
    top = json_section(content, path, what="the trace", max_values=MAX_TRACE_VALUES)
    trace = to_record(Trace, top.values, top.reading)
    for index, call in enumerate(trace.calls):
        if fault := _fault(call):
            raise top.reading.fail(("calls", index), fault)
    return trace


def _fault(call: Call) -> str | None:
    """Return what contradicts itself in a call."""
    ends = (each for node in call.nodes for each in (*node.inputs, *node.outputs))
    if max((*call.evaluated, *call.held, *ends), default=-1) >= len(call.arrays):
        return "an array that is not there"
    unknown = {array.dtype for array in call.arrays} - dtypes.BITS.keys()
    return f"unknown dtype {short(min(unknown))}" if unknown else None
