"""The operations of dense and expert feed-forward blocks (mlx-lm models/switch_layers.py)."""

from collections.abc import Sequence

from memfit.estimators.arch.specs import DenseMLP, MixtureOfExperts
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.layer_plan import LayerPlan, Projection
from memfit.estimators.workspace.projections import adapted_each, project, project_each
from memfit.estimators.workspace.tape import Tape

# SwitchGLU sorts tokens by expert from this many on (switch_layers.py, do_sort).
_SORTED_FROM = 64
_INDEX = 4
_FLOAT32 = 4


def record_feed_forward(tape: Tape, x: int, plan: LayerPlan, call: CallShape) -> int:
    """Record the block on its normed input; return its output."""
    match plan.feed_forward:
        case MixtureOfExperts() as spec:
            return _experts(tape, x, plan, spec, call)
        case DenseMLP(activation_arrays=between):
            return _dense(tape, x, plan.dense, call, between=between)
        case None:
            return _dense(tape, x, plan.dense, call)
        case _ as spec:
            assert_never(spec)


def _dense(
    tape: Tape, x: int, projections: tuple[Projection, ...], call: CallShape, *, between: int = 0
) -> int:
    rows = call.rows
    inner = project_each(tape, x, projections[:-1], rows)
    down = projections[-1]
    inputs = [p.outputs for p in projections[:-1]]
    if len(inner) == 2 and between:
        acted = inner[0]
        for _ in range(between):
            acted = tape.allocate((inner[0],), rows * inputs[0])
        tape.inplace(acted, *inner)
    elif len(inner) == 2 and call.target.versions.has("product_after_silu"):
        acted = tape.inplace(tape.compiled(inner[0]), inner[1])
    elif len(inner) == 2:
        # swiglu is compiled to one kernel that writes over an input (mlx-lm activations.py).
        acted = tape.compiled(inner[0], inner[1])
    # One product holds gate and up (mlx-lm phi3.py, gate_up_proj); its halves are strided.
    elif inputs and inputs[0] == 2 * down.inputs:
        acted = tape.allocate(
            (inner[0],), rows * inputs[0] // 2, counts=ops.PART_COPY, is_part=True
        )
    else:
        acted = tape.compiled(inner[0]) if inner else x
    return project(tape, acted, down, rows)


def _experts(tape: Tape, x: int, plan: LayerPlan, spec: MixtureOfExperts, call: CallShape) -> int:
    picked = call.rows * spec.top_k
    scores, indices = _route(tape, x, plan, spec, call)
    hidden = tape.elements[x]
    gathered, order = x, None
    if picked >= _SORTED_FROM:
        # Sorted, the rows of one expert follow one another (switch_layers.py, _gather_sort).
        flat = tape.allocate((indices,), picked, nbytes=picked * _INDEX, counts=ops.FLAT_INDICES)
        order = tape.allocate((flat,), picked, nbytes=picked * _INDEX)
        inverse = tape.allocate((order,), picked, nbytes=picked * _INDEX)
        # order // top_k: the token that each sorted row is copied from.
        places = tape.allocate((order,), picked, nbytes=picked * _INDEX)
        # Every token is copied once for each of its experts.
        gathered = tape.allocate(
            (x, places), hidden * spec.top_k, counts=ops.EXPERT_GATHER, name="MoE gather"
        )
        indices = tape.allocate((flat, order), picked, nbytes=picked * _INDEX)
        order = inverse
    mixed = _switch(tape, gathered, indices, plan.experts, spec, picked)
    if order is not None:
        # _scatter_unsort: all rows are copied again, back to the order of the tokens.
        mixed = tape.allocate(
            (mixed, order), hidden * spec.top_k, counts=ops.EXPERT_GATHER, name="MoE gather"
        )
    # Float32 scores promote the weighted rows; the sum is cast back.
    if spec.float32_scores and call.width != _FLOAT32:
        mixed = tape.allocate(
            (mixed, scores),
            tape.elements[mixed],
            nbytes=tape.elements[mixed] * _FLOAT32,
            counts=ops.WEIGHTED_EXPERTS,
        )
        total = tape.allocate((mixed,), hidden, nbytes=hidden * _FLOAT32)
        total = tape.allocate((total,), hidden)
    else:
        tape.inplace(mixed, scores, counts=ops.WEIGHTED_EXPERTS)
        total = tape.allocate((mixed,), hidden)
    if spec.shared_intermediate and plan.dense:
        shared = _dense(tape, x, plan.dense, call)
        tape.inplace(total, shared)
    return total


def _route(
    tape: Tape, x: int, plan: LayerPlan, spec: MixtureOfExperts, call: CallShape
) -> tuple[int, int]:
    rows = call.rows
    width = _FLOAT32 if spec.float32_scores else call.width
    if plan.router:
        gates = project(tape, x, plan.router, rows, counts=ops.ROUTER_SCORES)
    else:
        gates = tape.allocate((x,), rows * spec.experts, counts=ops.ROUTER_SCORES)
    if spec.float32_scores:
        # Such classes cast the router's output (mlx-lm deepseek_v3.py, group_expert_select).
        gates = tape.allocate((gates,), rows * spec.experts, nbytes=rows * spec.experts * width)
    tape.inplace(gates)
    # argpartition orders the indices of all experts; the chosen ones are a view of them.
    indices = tape.allocate(
        (gates,), rows * spec.experts, nbytes=rows * spec.experts * _INDEX, counts=ops.TOP_EXPERTS
    )
    scores = tape.allocate((gates, indices), rows * spec.top_k, nbytes=rows * spec.top_k * width)
    total = tape.allocate((scores,), rows)
    tape.inplace(scores, total, counts=ops.NORMALISED_SCORES)
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
    inner = _products(tape, gathered, indices, into, picked, ops.EXPERT_MATMUL)
    if len(inner) == 2:
        acted = tape.compiled(inner[0], inner[1])
    elif into and into[0].outputs == 2 * spec.intermediate:
        acted = tape.allocate(
            (inner[0],), picked * spec.intermediate, counts=ops.PART_COPY, is_part=True
        )
    else:
        acted = tape.compiled(inner[0])
    (output,) = _products(tape, acted, indices, [down], picked, ops.EXPERT_MATMUL_DOWN)
    return output


def _products(
    tape: Tape,
    x: int,
    indices: int,
    experts: Sequence[Projection],
    picked: int,
    counts: ops.OperationCount,
) -> list[int]:
    # Each row takes the bias of its expert (switch_layers.py, bias[indices]), before the products.
    biases = [
        tape.allocate((indices,), picked * expert.outputs, counts=ops.EXPERT_GATHER)
        for expert in experts
        if expert.has_bias
    ]

    def product(expert: Projection) -> int:
        elements = picked * expert.outputs
        return tape.allocate(
            (x, indices), elements, weight=expert.touched, counts=counts, name="experts"
        )

    made = adapted_each(tape, x, experts, picked, product, gathers=True)
    for array, bias in zip(made, biases, strict=False):
        tape.inplace(array, bias)
    return made
