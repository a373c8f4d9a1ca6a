"""A recorded call in one order of nodes, whatever MLX merged at its sizes."""

from collections.abc import Iterable

from msgspec.structs import replace

from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.schedule import unmerged


def canonical(call: Call) -> Call:
    """Return the call as it runs, its nodes depth first from what it evaluates and holds.

    MLX merges what two users stretch a scalar to where the shapes happen to be equal, which a run
    does not (schedule.py). The order in which MLX runs nodes follows from their inputs alone.
    """
    call = unmerged(call)
    order = _depth_first(call)
    made = [out for position in order for out in call.nodes[position].outputs]
    given = _given(call, order)
    places = {array: place for place, array in enumerate((*given, *made))}

    def placed(arrays: Iterable[int]) -> tuple[int, ...]:
        return tuple(places[array] for array in arrays)

    return replace(
        call,
        arrays=tuple(call.arrays[array] for array in (*given, *made)),
        nodes=tuple(
            node._replace(inputs=placed(node.inputs), outputs=placed(node.outputs))
            for node in (call.nodes[position] for position in order)
        ),
        evaluated=placed(call.evaluated),
        held=placed(call.held),
    )


def _given(call: Call, order: list[int]) -> list[int]:
    """Return the arrays from before the call: those of the model, then constants by their use."""
    used = (array for position in order for array in call.nodes[position].inputs)
    constants = dict.fromkeys(a for a in used if call.arrays[a].role == "constant")
    others = [
        i for i, array in enumerate(call.arrays) if array.role not in ("constant", "computed")
    ]
    return [*others, *constants]


def _depth_first(call: Call) -> list[int]:
    maker = {out: position for position, node in enumerate(call.nodes) for out in node.outputs}
    order: dict[int, None] = {}
    for end in (*call.evaluated, *call.held):
        stack = [(maker[end], False)] if end in maker else []
        while stack:
            position, is_ready = stack.pop()
            if is_ready:
                order[position] = None
            elif position not in order:
                stack.append((position, True))
                inputs = reversed(call.nodes[position].inputs)
                stack += [(maker[i], False) for i in inputs if i in maker and maker[i] not in order]
    return list(order)
