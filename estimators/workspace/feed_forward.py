"""The operations of dense and expert feed-forward blocks (mlx-lm models/switch_layers.py)."""

from memfit.estimators.arch.specs import MixtureOfExperts
from memfit.estimators.workspace.call import Call
from memfit.estimators.workspace.layer_plan import LayerPlan, Projection
from memfit.estimators.workspace.tape import Tape

# SwitchGLU sorts tokens by expert from this many on (switch_layers.py, do_sort).
_SORTED_FROM = 64
_INDEX = 4
_FLOAT32 = 4


def record_feed_forward(tape: Tape, x: int, plan: LayerPlan, call: Call) -> int:
    """Record the block on its normed input; return its output."""
    if isinstance(plan.feed_forward, MixtureOfExperts):
        return _experts(tape, x, plan, plan.feed_forward, call)
    return _dense(tape, x, plan.dense, call.rows)


def _dense(tape: Tape, x: int, projections: tuple[Projection, ...], rows: int) -> int:
    inner = [
        tape.new((x,), rows * projection.outputs, weight=projection.touched, views=projection.views)
        for projection in projections[:-1]
    ]
    down = projections[-1]
    inputs = [p.outputs for p in projections[:-1]]
    if len(inner) == 2:
        acted = tape.over(inner[0], inner[1])
    elif inputs and inputs[0] == 2 * down.inputs:
        acted = tape.new((inner[0],), rows * inputs[0] // 2, views=1)
    else:
        acted = tape.over(inner[0]) if inner else x
    return tape.new((acted,), rows * down.outputs, weight=down.touched, views=down.views)


def _experts(tape: Tape, x: int, plan: LayerPlan, spec: MixtureOfExperts, call: Call) -> int:
    rows, picked = call.rows, call.rows * spec.top_k
    scores, indices = _route(tape, x, plan, spec, call)
    hidden = tape.elements[x]
    gathered, order = x, None
    if picked >= _SORTED_FROM:
        flat = tape.new((indices,), picked, nbytes=picked * _INDEX, views=1)
        order = tape.new((flat,), picked, nbytes=picked * _INDEX)
        inverse = tape.new((order,), picked, nbytes=picked * _INDEX)
        places = tape.new((order,), picked, nbytes=picked * _INDEX)
        gathered = tape.new((x, places), hidden * spec.top_k, views=2, name="MoE gather")
        indices = tape.new((flat, order), picked, nbytes=picked * _INDEX)
        order = inverse
    mixed = _switch(tape, gathered, indices, plan.experts, spec, picked)
    if order is not None:
        mixed = tape.new((mixed, order), hidden * spec.top_k, views=2, name="MoE gather")
    if plan.float32_scores and call.width != _FLOAT32:
        mixed = tape.new(
            (mixed, scores), tape.elements[mixed], nbytes=tape.elements[mixed] * _FLOAT32, views=2
        )
        total = tape.new((mixed,), hidden, nbytes=hidden * _FLOAT32)
        total = tape.new((total,), hidden)
    else:
        tape.over(mixed, scores, views=2)
        total = tape.new((mixed,), hidden)
    if spec.shared_intermediate and plan.dense:
        shared = _dense(tape, x, plan.dense, rows)
        tape.over(total, shared)
    return total


def _route(
    tape: Tape, x: int, plan: LayerPlan, spec: MixtureOfExperts, call: Call
) -> tuple[int, int]:
    rows = call.rows
    weight = plan.router.touched if plan.router else 0
    width = _FLOAT32 if plan.float32_scores else call.width
    gates = tape.new((x,), rows * spec.experts, weight=weight, views=1)
    if plan.float32_scores:
        gates = tape.new((gates,), rows * spec.experts, nbytes=rows * spec.experts * width)
    tape.over(gates)
    indices = tape.new((gates,), rows * spec.experts, nbytes=rows * spec.experts * _INDEX, views=2)
    scores = tape.new((gates, indices), rows * spec.top_k, nbytes=rows * spec.top_k * width)
    total = tape.new((scores,), rows)
    tape.over(scores, total, views=1)
    return scores, indices


def _switch(
    tape: Tape,
    gathered: int,
    indices: int,
    experts: tuple[Projection, ...],
    spec: MixtureOfExperts,
    picked: int,
) -> int:
    *into, down = experts
    inner = [
        tape.new((gathered, indices), picked * e.outputs, weight=e.touched, views=1, name="experts")
        for e in into
    ]
    if len(inner) == 2:
        acted = tape.over(inner[0], inner[1])
    elif into and into[0].outputs == 2 * spec.intermediate:
        acted = tape.new((inner[0],), picked * spec.intermediate, views=1)
    else:
        acted = tape.over(inner[0])
    return tape.new((acted, indices), picked * down.outputs, weight=down.touched, name="experts")
