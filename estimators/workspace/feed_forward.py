"""The operations of dense and expert feed-forward blocks (mlx-lm models/switch_layers.py)."""

from collections.abc import Sequence

from memfit.estimators.arch.specs import DenseMLP, MixtureOfExperts
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.prepared import LayerPlan, Projection
from memfit.estimators.workspace.projections import adapted_each, norm, project, project_each
from memfit.estimators.workspace.recurrent_steps import token_shift
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
        case DenseMLP() as spec:
            if spec.token_shift:
                # The product of the shifted tokens and a weight is added to their own.
                x = tape.compiled(token_shift(tape, x, call), x)
            return _dense(tape, x, plan.dense, call, between=spec.activation_arrays)
        case None:
            return _dense(tape, x, plan.dense, call)
        case _ as spec:
            assert_never(spec)


def _dense(
    tape: Tape, x: int, projections: tuple[Projection, ...], call: CallShape, *, between: int = 0
) -> int:
    rows = call.rows
    if between > 1:
        # What a sparse activation does first is done before the other product is made.
        gate = project(tape, x, projections[0], rows)
        width = rows * projections[0].outputs
        parts = [tape.allocate((gate,), width) for _ in range(between - 1)]
        inner = [parts[-1], *project_each(tape, x, projections[1:-1], rows)]
    else:
        inner = project_each(tape, x, projections[:-1], rows)
    down = projections[-1]
    inputs = [p.outputs for p in projections[:-1]]
    if between:
        acted = _activated(tape, inner, rows * inputs[0])
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


def _activated(tape: Tape, inner: Sequence[int], elements: int) -> int:
    """Record an activation of two kernels, with an array between them."""
    return tape.compiled(tape.allocate((inner[0],), elements), *inner)


def _experts(tape: Tape, x: int, plan: LayerPlan, spec: MixtureOfExperts, call: CallShape) -> int:
    picked = call.rows * spec.top_k
    scores, indices = _route(tape, x, plan, spec, call)
    routed = norm(tape, x, tape.elements[x], shared=True) if spec.own_norms else x
    if plan.latent:
        routed = project(tape, routed, plan.latent[0], call.rows)
    hidden = tape.elements[routed]
    if spec.weighted_inputs:
        routed = tape.allocate((routed, scores), hidden)
    gathered, order = routed, None
    if picked >= _SORTED_FROM:
        # Sorted, the rows of one expert follow one another (switch_layers.py, _gather_sort).
        flat = tape.allocate((indices,), picked, nbytes=picked * _INDEX, counts=ops.FLAT_INDICES)
        order = tape.allocate((flat,), picked, nbytes=picked * _INDEX)
        inverse = tape.allocate((order,), picked, nbytes=picked * _INDEX)
        # order // top_k: the token that each sorted row is copied from.
        places = tape.allocate((order,), picked, nbytes=picked * _INDEX)
        # Every token is copied once for each of its experts.
        gathered = tape.allocate(
            (routed, places), hidden * spec.top_k, counts=ops.EXPERT_GATHER, name="MoE gather"
        )
        indices = tape.allocate((flat, order), picked, nbytes=picked * _INDEX)
        order = inverse
    mixed = _switch(tape, gathered, indices, plan.experts, spec, picked)
    if order is not None:
        # _scatter_unsort: all rows are copied again, back to the order of the tokens.
        mixed = tape.allocate(
            (mixed, order), hidden * spec.top_k, counts=ops.EXPERT_GATHER, name="MoE gather"
        )
    total = mixed if spec.weighted_inputs else _weighted_sum(tape, mixed, scores, hidden, spec)
    if plan.latent:
        total = project(tape, total, plan.latent[1], call.rows)
    if spec.shared_intermediate and plan.dense:
        if spec.own_norms:
            x = norm(tape, x, tape.elements[x], shared=True)
        shared = _dense(tape, x, plan.dense, call, between=spec.activation_arrays)
        tape.inplace(total, shared)
    return total


def _weighted_sum(tape: Tape, mixed: int, scores: int, hidden: int, spec: MixtureOfExperts) -> int:
    if not spec.float32_scores or tape.width == _FLOAT32:
        tape.inplace(mixed, scores, counts=ops.WEIGHTED_EXPERTS)
        return tape.allocate((mixed,), hidden)
    # Float32 scores promote the weighted rows; the sum is cast back.
    elements = tape.elements[mixed]
    mixed = tape.allocate((mixed,), elements, nbytes=elements * _FLOAT32)
    tape.inplace(mixed, scores, counts=ops.WEIGHTED_EXPERTS)
    total = tape.allocate((mixed,), hidden, nbytes=hidden * _FLOAT32)
    return tape.allocate((total,), hidden)


def _route(
    tape: Tape, x: int, plan: LayerPlan, spec: MixtureOfExperts, call: CallShape
) -> tuple[int, int]:
    rows = call.rows
    width = _FLOAT32 if spec.float32_scores else call.width
    if plan.router:
        given = x
        if spec.float32_router and call.width != _FLOAT32:
            given = _cast_router(tape, x, plan.router)
        gates = project(tape, given, plan.router, rows, counts=ops.ROUTER_SCORES)
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


def _cast_router(tape: Tape, x: int, router: Projection) -> int:
    """Record the casts of the router's input and, unless it is packed, of its matrix."""
    elements = tape.elements[x]
    given = tape.allocate((x,), elements, nbytes=elements * _FLOAT32)
    if not router.packing:
        cells = router.touched
        tape.allocate((), cells, nbytes=cells * _FLOAT32, weight=cells)
    return given


def _switch(
    tape: Tape,
    gathered: int,
    indices: int,
    experts: tuple[Projection, ...],
    spec: MixtureOfExperts,
    picked: int,
) -> int:
    *into, down = experts
    biases = _gathered_biases(tape, indices, into, picked)
    inner = _products(tape, gathered, indices, into, picked, ops.EXPERT_MATMUL)
    # MLX walks the graph breadth first, so the last bias comes before the others are added.
    down_biases = _gathered_biases(tape, indices, (down,), picked)
    for array, bias in zip(inner, biases, strict=False):
        tape.inplace(array, bias)
    if spec.activation_arrays:
        acted = _activated(tape, inner, picked * spec.intermediate)
    elif len(inner) == 2:
        acted = tape.compiled(inner[0], inner[1])
    elif into and into[0].outputs == 2 * spec.intermediate:
        acted = tape.allocate(
            (inner[0],), picked * spec.intermediate, counts=ops.PART_COPY, is_part=True
        )
    else:
        acted = tape.compiled(inner[0])
    (output,) = _products(tape, acted, indices, (down,), picked, ops.EXPERT_MATMUL_DOWN)
    for bias in down_biases:
        tape.inplace(output, bias)
    return output


def _gathered_biases(
    tape: Tape, indices: int, experts: Sequence[Projection], picked: int
) -> list[int]:
    """Record the bias of each row's expert (switch_layers.py, bias[indices])."""
    return [
        tape.allocate((indices,), picked * expert.outputs, counts=ops.EXPERT_GATHER)
        for expert in experts
        if expert.has_bias
    ]


def _products(
    tape: Tape,
    x: int,
    indices: int,
    experts: Sequence[Projection],
    picked: int,
    counts: ops.OperationCount,
) -> list[int]:
    def product(expert: Projection) -> int:
        return tape.allocate(
            (x, indices),
            picked * expert.outputs,
            weight=expert.touched,
            counts=counts,
            # The numbers of rows (mlx ops.cpp, gather_mm): small, but CUDA's peak is a bound.
            temporary=picked * _INDEX if tape.backend == "cuda" else 0,
            name="experts",
        )

    return adapted_each(tape, x, experts, picked, product, gathers=True)
