"""From a graph with the borders of compiled functions to the graph that MLX evaluates."""

from collections.abc import Container, Iterable, Mapping, Sequence

from memfit.estimators.trace.fusion import broadcast_all, fuse
from memfit.estimators.trace.graph_format import Array, Node

# Names of nodes that are no operation: each is followed by a label, the number of the function's
# call, and by ANY_SHAPE when the function is compiled for arguments of any shape.
_BORDER = "memfit_compile_"
BEGINS, ENDS = f"{_BORDER}begins_", f"{_BORDER}ends_"
ANY_SHAPE = "s"


def without_borders(
    nodes: Sequence[Node], outputs: Sequence[int], arrays: list[Array]
) -> tuple[list[Node], list[int]]:
    """Return nodes in depth-first order from ``outputs``, and these, with functions compiled.

    Arrays that fusion makes are appended to ``arrays``; those that no node makes stay there.
    """
    borders = {i: node for i, node in enumerate(nodes) if node.name.startswith(_BORDER)}
    # A border gives its arrays new numbers; without borders they have their first ones.
    same = _aliases(borders.values())
    makers = {output: i for i, node in enumerate(nodes) for output in node.outputs}
    inside = _functions(nodes, borders, makers)
    apart = inside.keys() - _read_outside(nodes, borders, makers, inside)
    # compile replaces a function by its fused nodes and leaves all other nodes alone.
    made = [
        _renamed(node, same) for i, node in enumerate(nodes) if i not in apart and i not in borders
    ]
    functions: dict[str, list[Node]] = {}
    for index, labels in inside.items():
        for label in labels:
            functions.setdefault(label, []).append(_renamed(nodes[index], same))
    results = {
        node.name.removeprefix(ENDS): [same.get(a, a) for a in node.inputs]
        for node in borders.values()
        if node.name.startswith(ENDS)
    }
    for label, tape in functions.items():
        if label.endswith(ANY_SHAPE):
            tape = broadcast_all(tape, results[label], arrays)
        made += fuse(tape, results[label], arrays)
    ends = [same.get(array, array) for array in outputs]
    return depth_first(makers_of(made), ends), ends


def _aliases(borders: Iterable[Node]) -> dict[int, int]:
    """Return for the outputs of every border the array that passed it."""
    same: dict[int, int] = {}
    for node in borders:
        for before, after in zip(node.inputs, node.outputs, strict=True):
            same[after] = same.get(before, before)
    return same


def _functions(
    nodes: Sequence[Node], borders: Mapping[int, Node], makers: Mapping[int, int]
) -> dict[int, list[str]]:
    """Return the labels of the compiled calls that each node inside one belongs to.

    Export merges what calls do to equal scalars, so a node can be in several.
    """
    inside: dict[int, list[str]] = {}
    for node in borders.values():
        if not node.name.startswith(ENDS):
            continue
        label = node.name.removeprefix(ENDS)
        seen: set[int] = set()
        # From the end of a function back to its beginning, or to constants made inside.
        waiting = list(node.inputs)
        while waiting:
            index = makers.get(waiting.pop())
            if index is not None and index not in seen and index not in borders:
                seen.add(index)
                inside.setdefault(index, []).append(label)
                waiting += nodes[index].inputs
    # In the order of the recording: a node comes after those that make its inputs.
    return dict(sorted(inside.items()))


def _read_outside(
    nodes: Sequence[Node],
    borders: Mapping[int, Node],
    makers: Mapping[int, int],
    inside: Container[int],
) -> set[int]:
    """Return the nodes inside compiled functions that make what nodes outside read.

    Export merges what both do to equal scalars; results of a function pass its border.
    """
    found: set[int] = set()
    waiting = [
        array
        for i, node in enumerate(nodes)
        if i not in inside and not (i in borders and node.name.startswith(ENDS))
        for array in node.inputs
    ]
    while waiting:
        index = makers.get(waiting.pop())
        if index is not None and index in inside and index not in found:
            found.add(index)
            waiting += nodes[index].inputs
    return found


def _renamed(node: Node, same: dict[int, int]) -> Node:
    if same.keys().isdisjoint(node.inputs):
        return node
    inputs = tuple(same.get(array, array) for array in node.inputs)
    return Node(node.name, inputs, node.outputs, node.arguments)


def makers_of(nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node that makes each array."""
    return {output: node for node in nodes for output in node.outputs}


def depth_first(
    makers: Mapping[int, Node], outputs: Sequence[int], computed: Container[int] = ()
) -> list[Node]:
    """Return the nodes that outputs need, each after those that make its inputs.

    Arrays that are ``computed`` already need none.
    """
    order: list[Node] = []
    seen: set[int] = set()
    # A stack of its own: a graph can be deeper than Python's recursion limit.
    waiting = list(outputs[::-1])
    while waiting:
        array = waiting.pop()
        # Below zero is an array with all inputs in the order.
        if array < 0:
            order.append(makers[~array])
        elif array in makers and array not in seen and array not in computed:
            node = makers[array]
            seen.update(node.outputs)
            waiting.append(~array)
            waiting += node.inputs[::-1]
    return order
