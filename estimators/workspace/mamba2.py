"""The operations of Mamba-2 in its matrix form (mlx-lm models/ssm.py, ssm_attn)."""

from memfit.estimators.arch.specs import Recurrent
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.tape import Tape

_CHUNK = 256


def record_mamba2(tape: Tape, mixed: int, spec: Recurrent, call: CallShape, width: int) -> int:
    """Mamba-2 in its matrix form: decays of every pair of tokens in a chunk; return its output.

    ``width`` are the bytes of an element of the state.
    """
    inner = call.rows * spec.inner_dim
    step = call.tokens if call.target.versions.has("whole_ssm") else _CHUNK
    state = call.batch * spec.state[1].elements
    old = tape.existing(state, state * width) if call.has_states else None
    # dt is of the state's type, float32 since mlx-lm 0.31.2, so dt * x is too.
    wide = tape.allocate((mixed,), inner, nbytes=inner * width, counts=ops.TIME_STEPS)
    outputs = []
    for start in range(0, call.tokens, step):
        tokens = min(step, call.tokens - start)
        pairs = call.batch * tokens * tokens
        cells, part = pairs * spec.heads, call.batch * tokens * spec.inner_dim
        decays = tape.allocate((wide,), cells, nbytes=cells * width, counts=ops.CHUNK_DECAYS)
        # segsum holds a number for every pair of tokens; each step writes over the one before, but
        # not the cumulative sum of the CPU (mlx backend/cpu/scan.cpp).
        counts = ops.CHUNK_DECAY_STEP
        if tape.backend == "cpu":
            decays = tape.allocate((decays,), cells, nbytes=cells * width, counts=counts)
        else:
            tape.inplace(decays, counts=counts)
        tape.inplace(decays, counts=counts)
        product = tape.allocate((mixed,), pairs * spec.groups, counts=ops.CHUNK_PRODUCTS)
        # CB * decay: the half-precision product is cast to float32, where the decays are.
        weights = _repeated(tape, product, cells, spec, width, ops.CHUNK_REPEATED)
        tape.inplace(weights, decays)
        tape.inplace(weights, counts=ops.CHUNK_WEIGHTS)
        output = tape.allocate((weights, wide), part, nbytes=part * width, counts=ops.CHUNK_OUTPUT)
        if old is not None:
            earlier = tape.allocate((old, mixed), part, nbytes=part * width, counts=ops.OLD_OUTPUT)
            tape.inplace(output, earlier)
        if width != call.width:
            output = tape.allocate((output,), part)
        outputs.append(output)
        arrays = (mixed, wide, decays, old)
        if start + tokens < call.tokens:
            old = _next_state(tape, arrays, spec, tokens, call, width)
    # Only the next call needs the last state, so MLX runs it after all layers.
    tape.defer(lambda: _last_state(tape, arrays, spec, tokens, call, width))
    skipped = tape.allocate((mixed,), inner, counts=ops.CHUNKS_OUTPUT)
    return tape.inplace(skipped, *outputs)


_Arrays = tuple[int, int, int, int | None]


def _last_state(
    tape: Tape, arrays: _Arrays, spec: Recurrent, tokens: int, call: CallShape, width: int
) -> None:
    state = tape.retain(_next_state(tape, arrays, spec, tokens, call, width))
    if not call.has_states:
        tape.absent += tape.nbytes[state]


def _next_state(
    tape: Tape, arrays: _Arrays, spec: Recurrent, tokens: int, call: CallShape, width: int
) -> int:
    """The state after a chunk of Mamba-2 (mlx-lm models/ssm.py, next_state)."""
    mixed, wide, decays, old = arrays
    state = call.batch * spec.state[1].elements
    spread = state // spec.inner_dim * spec.heads * tokens
    repeated = _repeated(tape, mixed, spread, spec, width, ops.REPEATED_INPUT)
    part = call.batch * tokens * spec.inner_dim
    if tokens == call.tokens:
        # Nothing else reads dt * x of a call that is one chunk.
        decayed = tape.inplace(wide, decays, counts=ops.DECAYED_INPUT)
    else:
        decayed = tape.allocate((wide, decays), part, nbytes=part * width, counts=ops.DECAYED_INPUT)
    product = tape.allocate((decayed, repeated), state, nbytes=state * width)
    if old is not None:
        scaled = tape.allocate((old, decays), state, nbytes=state * width)
        tape.inplace(product, scaled)
    return product


def _repeated(
    tape: Tape, array: int, cells: int, spec: Recurrent, width: int, counts: ops.OperationCount
) -> int:
    """mx.repeat of each group for its heads, a view of the only group, and a cast."""
    is_cast = width != tape.width
    if spec.groups > 1 or not is_cast:
        array = tape.allocate((array,), cells, counts=counts)
    return tape.allocate((array,), cells, nbytes=cells * width) if is_cast else array
