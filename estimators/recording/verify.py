"""Recorded data compared with calls at sizes that it was not made from."""

from collections import Counter
from collections.abc import Hashable, Iterator

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.programs.assembly import assembled
from memfit.estimators.programs.graph import RecordedClass, Variant
from memfit.estimators.programs.select import structure_of
from memfit.estimators.recording.canonical import canonical
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.draws import DrawnCall, draw_calls
from memfit.estimators.trace.graph_format import Array, Call

_SEED = 77


def verify(plan: ClassPlan, recorded: RecordedClass) -> int:
    """Return how many calls at other sizes are as the data says.

    Raises:
        UnsupportedError: when one is not.
    """
    count = 0
    for variant in recorded.variants:
        [packed], backends = variant.facts["packed"], variant.facts["backend"]
        [targets] = (each for each in plan.targets() if each[0].backend in backends)
        drawn = draw_calls(plan, targets, packed=bool(packed), seed=_SEED, least=0)
        for calls in drawn.values():
            for each in calls:
                count += _compared(plan, recorded, variant, each)
    return count


def _compared(plan: ClassPlan, recorded: RecordedClass, variant: Variant, drawn: DrawnCall) -> bool:
    """Whether the data has a call; it then has to be the same."""
    try:
        structure = structure_of(recorded, variant, drawn.sizes)
    except UnsupportedError:
        return False
    call, kinds = drawn.call, plan.layer_kinds({**recorded.settings, **plan.base})
    planned = PlannedCall(call.phase, call.tokens, call.position)
    made = canonical(assembled(recorded, structure, kinds, drawn.sizes, planned).call)
    for number, (a, b) in enumerate(zip(_nodes(made), _nodes(call), strict=True)):
        if a != b:
            sizes = dict(drawn.sizes)
            raise UnsupportedError(f"{recorded.model_type}: node {number} at {sizes}: {a}, {b}")
    # Of a batch the prologue holds what masks are made of, before all layers.
    if Counter(_shapes(made, made.held)) != Counter(_shapes(call, call.held)):
        raise UnsupportedError(f"{recorded.model_type}: held arrays at {dict(drawn.sizes)}")
    return True


def _nodes(call: Call) -> Iterator[Hashable]:
    """Yield each node with its arrays; scales and constants are not among the arguments."""
    for node in call.nodes:
        arguments = tuple(each for each in node.arguments if not isinstance(each, float))
        ends = (node.inputs, node.outputs)
        yield node.name, *(_shapes(call, end) for end in ends), arguments


def _shapes(call: Call, arrays: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple(call.arrays[array] for array in arrays)
