"""The order in which MLX evaluates a graph.

Source: mlx/transforms.cpp, eval_impl: how often each array is used, then the tape.
"""

from memfit.estimators.trace.graph_format import Call

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
