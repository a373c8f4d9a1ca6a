"""A recorded call at given sizes and full depth, as the trace would have recorded it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.programs.expressions import compiled
from memfit.estimators.programs.graph import (
    LAYER,
    Argument,
    Block,
    RecordedClass,
    Reference,
    Structure,
    layer_key,
)
from memfit.estimators.trace.graph_format import Array, Call, Node

_Values = Mapping[str, Any]


class Assembled(NamedTuple):
    """A call, and which of its nodes and arrays belong to which layer."""

    call: Call
    node_layers: tuple[int, ...]
    """By position of the node; -1 is the prologue."""
    array_layers: tuple[int, ...]


def blocks_of(recorded: RecordedClass, structure: Structure, kinds: tuple[str, ...]) -> list[int]:
    """Return the blocks of the layers, by their position in the class.

    Raises:
        UnsupportedError: when no recording has a layer of such a kind in such a place.
    """
    keys = [layer_key(kinds, layer) for layer in range(len(kinds))]
    for layer, key in enumerate(keys):
        if key not in structure.layers:
            raise UnsupportedError(f"layer {layer} of kind {key!r} is not among the recorded ones")
    return [structure.layers[key] for key in keys]


def assembled(
    recorded: RecordedClass,
    structure: Structure,
    kinds: tuple[str, ...],
    sizes: _Values,
    planned: PlannedCall,
) -> Assembled:
    """Return a call of ``structure`` with ``sizes``, integers or what computes like them.

    Raises:
        UnsupportedError: when a layer is of an unrecorded kind.
    """
    layers = blocks_of(recorded, structure, kinds)
    known = {position: recorded.block(position) for position in {structure.prologue, *layers}}
    values = _size_values(known.values(), sizes)
    parts = [known[structure.prologue], *(known[position] for position in layers)]
    return _Assembly(parts, values).finish(planned)


class _Assembly:
    """Blocks one after another, with one numbering of arrays: inputs first, then computed ones."""

    def __init__(self, parts: Sequence[Block], values: _Values) -> None:
        self._parts, self._values = parts, values
        # Position in the call of each array of each block.
        self._positions: list[list[int]] = [[0] * len(block.arrays) for block in parts]
        self._arrays: list[Array] = []
        self._array_layers: list[int] = []

    def finish(self, planned: PlannedCall) -> Assembled:
        self._place(lambda array: array.role != "computed")
        self._place(lambda array: array.role == "computed")
        nodes: list[Node] = []
        node_layers: list[int] = []
        for part, block in enumerate(self._parts):
            for node in block.nodes:
                inputs = tuple(self._at(part, each) for each in node.inputs)
                outputs = tuple(self._positions[part][each] for each in node.outputs)
                arguments = tuple(self._argument(each) for each in node.arguments)
                nodes.append(Node(node.name, inputs, outputs, arguments))
            node_layers += [part - 1] * len(block.nodes)
        evaluated = self._listed(lambda block: block.evaluated)
        held = self._listed(lambda block: block.cached)
        call = Call(
            phase=planned.phase,
            tokens=planned.tokens,
            position=planned.position,
            arrays=tuple(self._arrays),
            nodes=tuple(nodes),
            evaluated=evaluated,
            held=tuple(dict.fromkeys((*evaluated, *held))),
        )
        return Assembled(call, tuple(node_layers), tuple(self._array_layers))

    def _place(self, wanted: Callable[[Any], bool]) -> None:
        for part, block in enumerate(self._parts):
            for index, array in enumerate(block.arrays):
                if wanted(array):
                    self._positions[part][index] = len(self._arrays)
                    shape = tuple(self._values[axis] for axis in array.shape)
                    name = array.name.replace(LAYER, str(part - 1))
                    self._arrays.append(Array(shape, array.dtype, array.role, name))
                    self._array_layers.append(part - 1)

    def _at(self, part: int, reference: Reference) -> int:
        if not reference.block:
            return self._positions[part][reference.place]
        other = 0 if reference.block < 0 else part - reference.block
        return self._positions[other][self._parts[other].exports[reference.place]]

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return tuple(self._argument(each) for each in argument)
        if isinstance(argument, str) and argument.startswith("="):
            return self._values[argument[1:]]
        return argument

    def _listed(self, of: Callable[[Block], tuple[Reference, ...]]) -> tuple[int, ...]:
        return tuple(
            self._at(part, each) for part, block in enumerate(self._parts) for each in of(block)
        )


def _size_values(blocks: Any, sizes: _Values) -> dict[str, Any]:
    """Return the value of every expression of some blocks."""
    texts = sorted({text for block in blocks for text in _texts(block)})
    return dict(zip(texts, compiled(texts)(sizes), strict=True))


def _texts(block: Block) -> chain[str]:
    axes = (axis for array in block.arrays for axis in array.shape)
    arguments = (argument for node in block.nodes for argument in node.arguments)
    flat = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in arguments)
    return chain(
        axes, (each[1:] for each in flat if isinstance(each, str) and each.startswith("="))
    )
