"""A recorded call cut into its prologue and its layers."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.programs.graph import (
    LAYER,
    Argument,
    Block,
    BlockArray,
    BlockNode,
    BlockText,
    Reference,
    reference_text,
)
from memfit.estimators.trace.graph_format import Call

_PROLOGUE = -1
_NUMBERED = re.compile(r"(.*?)\b(\d+)\.(.*)")


class FittedCall(NamedTuple):
    """A recorded call of a structure, with the expressions of its sizes."""

    call: Call
    shapes: tuple[tuple[str, ...], ...]
    """By array."""
    arguments: tuple[tuple[Argument, ...], ...]
    """By node."""


def layers_root(names: Sequence[str]) -> str:
    """Return what comes before the number of a layer in the names of weights."""
    roots = Counter(m[1] for name in names if (m := _NUMBERED.fullmatch(name)))
    if not roots:
        raise UnsupportedError("no weight is named by the number of a layer")
    return roots.most_common(1)[0][0]


class Splitting:
    """Assigns every array of a call to a layer, or to the prologue before all of them."""

    def __init__(self, fitted: FittedCall, root: str) -> None:
        self._fitted, self._root = fitted, root
        call = fitted.call
        self._layers: list[int] = [_PROLOGUE] * len(call.arrays)
        # The number in a name, until what is in no layer has been placed.
        named = [self._named(i) for i in range(len(call.arrays))]
        users: list[set[int]] = [set() for _ in call.arrays]
        self._node_layers = [_PROLOGUE] * len(call.nodes)
        for position, node in enumerate(call.nodes):
            at = (
                max((self._layers[i] if named[i] is None else named[i] or 0) for i in node.inputs)
                if node.inputs
                else _PROLOGUE
            )
            self._node_layers[position] = at
            for out in node.outputs:
                self._layers[out] = at
        for i, number in enumerate(named):
            if number is not None:
                self._layers[i] = number
        # What one layer alone uses belongs to it, also where it follows from no weight of it.
        for position in reversed(range(len(call.nodes))):
            node = call.nodes[position]
            if self._node_layers[position] == _PROLOGUE:
                self._sink(position, set().union(*(users[out] for out in node.outputs)))
            for i in node.inputs:
                users[i].add(self._node_layers[position])
        for i, array in enumerate(call.arrays):
            if array.role != "computed" and named[i] is None and array.role != "tokens":
                if len(users[i]) == 1:
                    self._layers[i] = users[i].pop()

    def _sink(self, position: int, layers: set[int]) -> None:
        if len(layers) == 1:
            [layer] = layers
            self._node_layers[position] = layer
            for out in self._fitted.call.nodes[position].outputs:
                self._layers[out] = layer

    def _named(self, index: int) -> int | None:
        array = self._fitted.call.arrays[index]
        if array.role == "cache":
            number, _, _ = array.name.partition(".")
            return int(number)
        match = _NUMBERED.fullmatch(array.name) if array.role == "weight" else None
        return int(match[2]) if match and match[1] == self._root else None

    def blocks(self, count: int) -> tuple[list[Block], list[int]]:
        """Return the prologue and the blocks of ``count`` layers, and each array's place in them."""
        call = self._fitted.call
        parts: list[list[int]] = [[] for _ in range(count + 1)]
        for wanted in (False, True):
            for i, array in enumerate(call.arrays):
                if (array.role == "computed") is not wanted:
                    continue
                if not wanted:
                    parts[self._layers[i] + 1].append(i)
            if wanted:
                for position, node in enumerate(call.nodes):
                    parts[self._node_layers[position] + 1].extend(node.outputs)
        places = [0] * len(call.arrays)
        for part in parts:
            for place, i in enumerate(part):
                places[i] = place
        sampled = set(call.evaluated)
        blocks = []
        for part, own in enumerate(parts):
            layer = part - 1
            nodes = tuple(
                BlockNode(
                    node.name,
                    tuple(self._reference(i, layer, places) for i in node.inputs),
                    tuple(places[out] for out in node.outputs),
                    self._fitted.arguments[position],
                )
                for position, node in enumerate(call.nodes)
                if self._node_layers[position] == layer
            )
            listed = [
                tuple(self._reference(i, layer, places) for i in group if self._layers[i] == layer)
                for group in (call.evaluated, [i for i in call.held if i not in sampled])
            ]
            arrays = tuple(self._array(i, layer) for i in own)
            blocks.append(Block(arrays, nodes, listed[0], listed[1]))
        return blocks, places

    def _reference(self, index: int, layer: int, places: list[int]) -> Reference:
        at = self._layers[index]
        return Reference(layer - at if at >= 0 else (0 if layer < 0 else -1), places[index])

    def _array(self, index: int, layer: int) -> BlockArray:
        array = self._fitted.call.arrays[index]
        name = array.name
        if array.role == "cache":
            name = f"{LAYER}.{name.partition('.')[2]}"
        elif array.role == "weight" and layer >= 0 and (m := _NUMBERED.fullmatch(name)):
            name = f"{m[1]}{LAYER}.{m[3]}" if m[1] == self._root else name
        return BlockArray(array.role, array.dtype, self._fitted.shapes[index], name)


def block_text(block: Block) -> BlockText:
    """Return a block as its file has it."""
    made = {out for node in block.nodes for out in node.outputs}
    inputs = tuple(_array_text(array) for i, array in enumerate(block.arrays) if i not in made)
    nodes: list[tuple[Any, ...]] = []
    for node in block.nodes:
        outputs = [_array_text(block.arrays[out]).partition(" ")[2] for out in node.outputs]
        nodes.append(
            (node.name, " ".join(map(reference_text, node.inputs)), outputs, *node.arguments)
        )
    return BlockText(
        inputs=inputs,
        nodes=tuple(nodes),
        evaluated=" ".join(map(reference_text, block.evaluated)),
        cached=" ".join(map(reference_text, block.cached)),
    )


def _array_text(array: BlockArray) -> str:
    shape = ",".join(each.replace(" ", "") for each in array.shape) or "-"
    return f"{array.role} {array.dtype} {shape} {array.name}".rstrip()
