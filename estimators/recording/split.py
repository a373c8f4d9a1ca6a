"""A recorded call cut into its prologue and its layers."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from memfit.estimators.trace.graph_format import Call, Node

_PROLOGUE = -1
_OF_MODULES = ("weight", "constant")
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
        self._numbers = [self._named(i) for i in range(len(call.arrays))]
        """The layers that arrays are named by."""
        self._flow()
        while lifted := self._for_all_layers():
            for array in lifted:
                self._numbers[array] = None
            self._flow()
        self._move_to_users()

    def _flow(self) -> None:
        """Assign each node to the last layer that it takes anything of."""
        self._layers = [_PROLOGUE if n is None else n for n in self._numbers]
        self._node_layers = [_PROLOGUE] * len(self._fitted.call.nodes)
        for position, node in enumerate(self._fitted.call.nodes):
            reached = max((self._layers[i] for i in node.inputs), default=_PROLOGUE)
            self._assign(position, reached)

    def _for_all_layers(self) -> set[int]:
        """Return the counts in caches of one layer that something for later layers is made of.

        The mask of a batch is made of the padding in the first cache.
        """
        call = self._fitted.call
        maker = {out: node for node in call.nodes for out in node.outputs}
        result: set[int] = set()
        for position, node in enumerate(call.nodes):
            for array in node.inputs:
                if array in maker and 0 <= self._layers[array] < self._node_layers[position] - 1:
                    ends = self._ends_in_layer(array, maker)
                    if all(map(self._is_count, ends)):
                        result |= ends
        return result

    def _ends_in_layer(self, array: int, maker: Mapping[int, Node]) -> set[int]:
        """Return what an array of a layer is made of that the layer has from before the call."""
        layer, ends, waiting = self._layers[array], set[int](), [array]
        while waiting:
            each = waiting.pop()
            if self._layers[each] != layer:
                continue
            if each in maker:
                waiting += maker[each].inputs
            else:
                ends.add(each)
        return ends

    def _is_count(self, array: int) -> bool:
        of = self._fitted.call.arrays[array]
        return of.role == "cache" and len(of.shape) <= 1

    def _assign(self, position: int, layer: int) -> None:
        self._node_layers[position] = layer
        for out in self._fitted.call.nodes[position].outputs:
            self._layers[out] = layer

    def _move_to_users(self) -> None:
        """Assign what one layer alone uses to it, also where it follows from no weight of it."""
        call = self._fitted.call
        users: list[set[int]] = [set() for _ in call.arrays]
        for position in reversed(range(len(call.nodes))):
            node = call.nodes[position]
            using = set().union(*(users[out] for out in node.outputs))
            if self._node_layers[position] == _PROLOGUE and len(using) == 1:
                self._assign(position, using.pop())
            for i in node.inputs:
                users[i].add(self._node_layers[position])
        for i, array in enumerate(call.arrays):
            is_free = self._numbers[i] is None and array.role in _OF_MODULES
            if is_free and len(users[i]) == 1:
                self._layers[i] = users[i].pop()

    def _named(self, index: int) -> int | None:
        array = self._fitted.call.arrays[index]
        if array.role == "cache":
            number, _, _ = array.name.partition(".")
            return int(number)
        match = _NUMBERED.fullmatch(array.name) if array.role in _OF_MODULES else None
        return int(match[2]) if match and match[1] == self._root else None

    def blocks(self, count: int) -> list[Block]:
        """Return the prologue and the blocks of ``count`` layers."""
        parts = self._parts(count)
        places = {array: place for part in parts for place, array in enumerate(part)}
        exports = self._exports(parts)
        call = self._fitted.call
        sampled = set(call.evaluated)
        cached = [array for array in call.held if array not in sampled]

        def references(arrays: Iterable[int], layer: int) -> tuple[Reference, ...]:
            return tuple(
                Reference(0, places[array])
                if self._layers[array] == layer
                else self._outside(array, layer, exports)
                for array in arrays
            )

        def own(arrays: Iterable[int], layer: int) -> list[int]:
            return [array for array in arrays if self._layers[array] == layer]

        return [
            Block(
                tuple(self._array(array, layer) for array in part),
                tuple(
                    BlockNode(
                        node.name,
                        references(node.inputs, layer),
                        tuple(places[out] for out in node.outputs),
                        self._fitted.arguments[position],
                    )
                    for position, node in enumerate(call.nodes)
                    if self._node_layers[position] == layer
                ),
                references(own(call.evaluated, layer), layer),
                references(own(cached, layer), layer),
                tuple(places[array] for array in exports[layer + 1]),
            )
            for layer, part in enumerate(parts, _PROLOGUE)
        ]

    def _parts(self, count: int) -> list[list[int]]:
        """Return the arrays of the prologue and of each layer, those before the call first."""
        call = self._fitted.call
        parts: list[list[int]] = [[] for _ in range(count + 1)]
        for i, array in enumerate(call.arrays):
            if array.role != "computed":
                parts[self._layers[i] + 1].append(i)
        for position, node in enumerate(call.nodes):
            parts[self._node_layers[position] + 1] += node.outputs
        return parts

    def _exports(self, parts: list[list[int]]) -> list[list[int]]:
        """Return the arrays of each part that others refer to, in the order of their first use."""
        used: list[dict[int, None]] = [{} for _ in parts]
        for position, node in enumerate(self._fitted.call.nodes):
            for array in node.inputs:
                if self._layers[array] != self._node_layers[position]:
                    used[self._layers[array] + 1][array] = None
        return [list(each) for each in used]

    def _outside(self, array: int, layer: int, exports: list[list[int]]) -> Reference:
        of = self._layers[array]
        block = _PROLOGUE if of == _PROLOGUE else layer - of
        return Reference(block, exports[of + 1].index(array))

    def _array(self, index: int, layer: int) -> BlockArray:
        array = self._fitted.call.arrays[index]
        name = array.name
        if array.role == "cache" and layer >= 0:
            name = f"{LAYER}.{name.partition('.')[2]}"
        elif array.role in _OF_MODULES and layer >= 0 and (m := _NUMBERED.fullmatch(name)):
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
        exports=" ".join(map(str, block.exports)),
    )


def _array_text(array: BlockArray) -> str:
    shape = ",".join(each.replace(" ", "") for each in array.shape) or "-"
    return f"{array.role} {array.dtype} {shape} {array.name}".rstrip()
