"""A recorded call as MLX runs it: with the operations that its export merged, in their order.

mx.export_function simplifies what it records (mlx/compile.cpp, compile_simplify), evaluation does
not. A scalar stretched to a shape, and the flattening that every product begins with, are one node
in the recording and one for each user in a run, each of which counts as work given to the device.
So are the activations that each product with an adapter casts to its type. The order is that of
mlx/transforms.cpp, eval_impl: how often each array is used, then the tape.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from memfit.estimators.trace.graph_format import Array, Call, Node

# A Python number in an expression becomes a scalar that is cast and broadcast (mlx ops.cpp).
_STRETCHES = frozenset({"Broadcast", "AsType"})
# matmul flattens the batch and the rows of its input to one axis (mlx ops.cpp).
_FLATTENS = "Flatten"
_PRODUCTS = frozenset({"Matmul", "GatherMM"})


def unmerged(call: Call) -> Call:
    """Return the call with stretched scalars and flattenings made again for each use."""
    copies = _Copies(call)
    arrays, nodes, made_by = copies.arrays, copies.nodes, copies.made_by
    promoted = _promoted(call)
    for node in call.nodes:
        inputs = node.inputs
        changed = node
        if not made_by.keys().isdisjoint(inputs):
            inputs = tuple(map(copies.own, inputs))
            changed = node._replace(inputs=inputs)
        nodes.append(changed)
        # What was made from an array stays one node: MLX runs it once.
        stretches = node.name in _STRETCHES and _is_scalar(node.inputs, arrays, made_by)
        if stretches or node.name == _FLATTENS or node.outputs[0] in promoted:
            made_by[node.outputs[0]] = changed
    return replace(call, arrays=tuple(arrays), nodes=tuple(nodes))


class _Copies:
    """The arrays and nodes of a call; it refers to nothing that refers to it."""

    def __init__(self, call: Call) -> None:
        self.arrays: list[Array] = list(call.arrays)
        self.nodes: list[Node] = []
        self.made_by: dict[int, Node] = {}
        """The stretches and flattenings, by their output."""
        self._used: set[int] = set()

    def own(self, array: int) -> int:
        """Return an array of the same value that no other node uses."""
        node = self.made_by.get(array)
        if node is None:
            return array
        # The first user keeps the recorded node.
        if array not in self._used:
            self._used.add(array)
            return array
        self.arrays.append(self.arrays[array])
        copy = len(self.arrays) - 1
        # The copy's input may be such a node too: a cast below a broadcast.
        self.nodes.append(Node(node.name, (self.own(node.inputs[0]),), (copy,), node.arguments))
        return copy


def _promoted(call: Call) -> set[int]:
    """Return the inputs that products with an adapter's first matrix have cast (mlx-lm lora.py)."""
    matrices = {i for i, array in enumerate(call.arrays) if array.name.endswith(".lora_a")}
    if not matrices:
        return set()
    seen_as = {
        node.outputs[0]: node.inputs[0]
        for node in call.nodes
        if node.name in (_FLATTENS, "Transpose")
    }
    inputs = {
        seen_as.get(node.inputs[0], node.inputs[0])
        for node in call.nodes
        if node.name in _PRODUCTS and seen_as.get(node.inputs[1], node.inputs[1]) in matrices
    }
    return {node.outputs[0] for node in call.nodes if node.name == "AsType"} & inputs


def _is_scalar(inputs: Sequence[int], arrays: list[Array], made_by: dict[int, Node]) -> bool:
    source = arrays[inputs[0]]
    known = made_by.get(inputs[0])
    if known is not None:
        return known.name in _STRETCHES
    return source.role == "constant" and not source.shape


# MLX_BFS_MAX_WIDTH in mlx/utils.h.
WIDTH = 20


def evaluation_order(call: Call) -> list[int]:
    """Return the positions of the nodes in the order they are evaluated.

    The tape is filled from the results down, breadth first until ``WIDTH`` arrays wait, and read
    from its end. An array is put on it at its last use; outputs of one node count as one.
    """
    # Outputs of one primitive are siblings: the first to be reached puts all on the tape.
    maker: dict[int, int] = {}
    for position, node in enumerate(call.nodes):
        for out in node.outputs:
            maker[out] = position
    uses = _uses(call, maker)
    tape: list[int] = []
    waiting: list[tuple[tuple[int, ...], int]] = []
    head = -1
    while head < len(tape) or waiting:
        start = 0
        if head >= len(tape):
            inputs, start = waiting.pop()
        else:
            # MLX begins with a Synchronizer node that has the evaluated arrays as its inputs.
            inputs = call.evaluated if head < 0 else call.nodes[tape[head]].inputs
            head += 1
        for index in range(start, len(inputs)):
            made_by = maker.get(inputs[index])
            # Weights, caches and tokens are evaluated already.
            if made_by is None:
                continue
            # Too wide: go on with what waits, and come back to the other inputs when it is done.
            if len(tape) - head >= WIDTH:
                waiting.append((inputs, index))
                break
            # Only at its last use, so that a node runs before every node that reads it.
            uses[made_by] -= 1
            if not uses[made_by]:
                tape.append(made_by)
    # eval_impl takes nodes from the back of the tape.
    tape.reverse()
    return tape


def _uses(call: Call, maker: dict[int, int]) -> dict[int, int]:
    """Return how often each node that the results need is used."""
    uses: dict[int, int] = {}
    stack = [call.evaluated]
    while stack:
        for array in stack.pop():
            node = maker.get(array)
            if node is None:
                continue
            if node in uses:
                uses[node] += 1
            else:
                uses[node] = 1
                stack.append(call.nodes[node].inputs)
    return uses
