"""One decoder layer put together, and what follows the last one."""

from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    KVBuffer,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.attention import record_attention
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.feed_forward import record_feed_forward
from memfit.estimators.workspace.latent import record_latent
from memfit.estimators.workspace.prepared import LayerPlan, MixerPlan
from memfit.estimators.workspace.projections import norm, project
from memfit.estimators.workspace.recurrent import record_gated_delta, record_recurrent
from memfit.estimators.workspace.tape import Program, Tape

_FLOAT32 = 4
# Norms of a layer that has one before each block; any more of them come after the blocks.
_PRE_NORMS = 2


def record_layer(
    plan: LayerPlan, call: CallShape, hidden: int, buffers: tuple[tuple[KVBuffer, ...], ...]
) -> Tape:
    """Return the operations of a layer; ``buffers`` are those of each mixer."""
    elements = call.rows * hidden
    target = call.target
    tape = Tape(
        target.backend,
        call.width,
        elements * plan.streams,
        splits=target.splits,
        compiled_copies=target.compiled_copies,
    )
    # Gemma 3n carries several hidden states for each token (altup_num_inputs).
    if plan.streams > 1:
        tape.output = _alternating(tape, plan, call, hidden, buffers)
    else:
        tape.output = _blocks(tape, 0, plan, call, elements, buffers)
    return tape


def _blocks(
    tape: Tape,
    x: int,
    plan: LayerPlan,
    call: CallShape,
    elements: int,
    buffers: tuple[tuple[KVBuffer, ...], ...],
) -> int:
    """Record the mixers and the feed-forward block of a layer; return its output."""
    norms_results = plan.norms_after or plan.norms > _PRE_NORMS
    # The residual addition still reads x, so no norm before a block can write over it.
    normed = x if plan.norms_after else norm(tape, x, elements, shared=True)
    if plan.mixers:
        mixed = [
            _mix(tape, normed, mixer, call, list(own))
            for mixer, own in zip(plan.mixers, buffers, strict=True)
        ]
        # Falcon-H1 adds attention and Mamba of the same input (mlx-lm falcon_h1.py).
        for other in mixed[1:]:
            tape.inplace(mixed[0], other)
        if norms_results:
            mixed[0] = norm(tape, mixed[0], elements, shared=False)
        # An addition writes over either operand that nothing else holds (mlx common/binary.h).
        x = tape.inplace(mixed[0], x)
    if plan.feed_forward is not None:
        # With one norm both blocks read what it makes (mlx-lm phi.py).
        if plan.mixers and plan.norms > 1:
            normed = x if plan.norms_after else norm(tape, x, elements, shared=True)
        result = record_feed_forward(tape, normed, plan, call)
        if norms_results:
            result = norm(tape, result, elements, shared=False)
        x = tape.inplace(result, x)
    # Gemma 3n gates only after its streams are corrected.
    if plan.own_input and plan.streams == 1:
        x = tape.inplace(_own_input(tape, x, plan, call), x)
    return x


def _own_input(tape: Tape, x: int, plan: LayerPlan, call: CallShape) -> int:
    """Record what takes in the layer's own input, up to its norm."""
    gate, back = plan.own_input
    # Activated by two kernels, then multiplied by the layer's own input.
    gated = tape.allocate((project(tape, x, gate, call.rows),), call.rows * gate.outputs)
    tape.inplace(gated)
    tape.inplace(gated, weight=call.rows * plan.own_width)
    return norm(tape, project(tape, gated, back, call.rows), tape.elements[x], shared=False)


def _alternating(
    tape: Tape,
    plan: LayerPlan,
    call: CallShape,
    hidden: int,
    buffers: tuple[tuple[KVBuffer, ...], ...],
) -> int:
    """Alternating updates: all streams predicted in float32, then corrected by one layer's output.

    mlx-lm gemma3n.py, Gemma3nAltUp: predict before the layer, correct after it.
    """
    elements = call.rows * hidden
    every = elements * plan.streams
    active = _coefficients(tape, tape.allocate((0,), elements), plan, call)
    wide = tape.allocate((0,), every, nbytes=every * _FLOAT32)
    product = tape.allocate(
        (wide, active), every, nbytes=every * _FLOAT32, counts=ops.STREAMS_MIXED
    )
    # The product has another layout, and the device reads the other operand.
    summed = tape.allocate((product, wide), every, nbytes=every * _FLOAT32)
    predicted = tape.allocate((summed,), every)
    active = tape.allocate((predicted,), elements)
    residual = active
    for projection in plan.residual:
        residual = project(tape, residual, projection, call.rows)
    output = _blocks(tape, active, plan, call, elements, buffers)
    tape.inplace(output, residual)
    routed = _coefficients(tape, tape.allocate((output,), elements), plan, call)
    # The innovation of one stream times float32 coefficients promotes all of them.
    innovation = tape.allocate((output, active), elements)
    widened = tape.allocate((innovation,), elements, nbytes=elements * _FLOAT32)
    # corrected += predictions: the half-precision operand is cast to float32 first.
    again = tape.allocate((predicted,), every, nbytes=every * _FLOAT32)
    corrected = tape.allocate(
        (widened, routed), every, nbytes=every * _FLOAT32, counts=ops.STREAMS_MIXED
    )
    tape.inplace(corrected, again)
    result = tape.allocate((corrected,), every)
    # One gated prediction is added to all streams but the first, as a slice update.
    added = _own_input(tape, tape.inplace(tape.allocate((result,), elements)), plan, call)
    others = tape.allocate((result, added), every - elements, counts=ops.OTHER_STREAMS)
    return tape.allocate((result, others), every, counts=ops.STREAMS_WRITTEN)


def _coefficients(tape: Tape, x: int, plan: LayerPlan, call: CallShape) -> int:
    """Record Gemma3nAltUp.compute_router_modalities of one stream, and what it is multiplied by."""
    # The norm and its scale write over the stream that nothing else reads.
    for _ in range(2):
        tape.inplace(x)
    cells = call.rows * plan.streams**2
    return tape.allocate((x,), cells, nbytes=cells * _FLOAT32, counts=ops.STREAM_COEFFICIENTS)


def head_program(
    vocabulary: int, touched: int, call: CallShape, hidden: int, sampled: int
) -> Program:
    """Return the steps after the last layer: norm, logits, log-probabilities, the sample.

    Logits are made of all tokens, the rest of ``sampled`` ones.
    """
    elements = call.rows * hidden
    tape = Tape(call.target.backend, call.width, elements)
    # Nothing reads the hidden states after the last norm.
    normed = norm(tape, 0, elements, shared=False)
    logits = tape.allocate((normed,), call.rows * vocabulary, weight=touched, name="logits")
    total = tape.allocate((logits,), sampled, nbytes=sampled * _FLOAT32)
    # generate_step yields the log-probabilities, so the caller holds them.
    logprobs = tape.retain(tape.allocate((logits, total), sampled * vocabulary, name="logits"))
    tape.allocate((logprobs,), sampled)
    return tape.program()


def _mix(tape: Tape, x: int, plan: MixerPlan, call: CallShape, buffers: list[KVBuffer]) -> int:
    if call.copies_states:
        for state in plan.mixer.states():
            width = _FLOAT32 if state.float32 else call.width
            elements = state.elements * call.batch
            old = tape.existing(elements, elements * width)
            tape.retain(tape.allocate((old,), elements, nbytes=elements * width))
    match plan.mixer:
        case Attention() as spec:
            return record_attention(tape, x, spec, plan, call, buffers[0])
        case LatentAttention() as spec:
            return record_latent(tape, x, spec, plan, call, buffers)
        case GatedDelta() as spec:
            return record_gated_delta(tape, x, spec, plan, call)
        case Recurrent() as spec:
            return record_recurrent(tape, x, spec, plan, call)
        case TracedMixer():
            raise UnsupportedError("no formula has the operations of a layer that is only traced")
        case _ as spec:
            assert_never(spec)
