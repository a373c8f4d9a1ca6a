"""The operations of recurrences: gated delta nets exactly, the others by their widths."""

from memfit.estimators.arch.caches import StateBuffer
from memfit.estimators.arch.specs import GatedDelta, Recurrent, Scan
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.layer_plan import MixerPlan
from memfit.estimators.workspace.mx_fast import norm
from memfit.estimators.workspace.projections import project, project_each
from memfit.estimators.workspace.tape import Tape

_FLOAT32 = 4
# A loop over tokens in Python repeats itself; more tokens than these are never in flight at once:
# each has three kernels or more, and there are eleven batches (mlx/data/scheduling.py).
_LOOPED_TOKENS = {"cpu": 40, "metal": 190, "cuda": 380}
# Metal's kernel of gated delta nets takes keys of multiples of this width.
_KERNEL_KEYS = 32
# Chunk of the matrix form of Mamba-2 (mlx-lm models/ssm.py, ssm_attn).
_SSM_CHUNK = 256


def record_gated_delta(
    tape: Tape, x: int, spec: GatedDelta, plan: MixerPlan, call: CallShape
) -> int:
    """Record a gated delta net (mlx-lm models/qwen3_next.py, gated_delta.py)."""
    rows = call.rows
    made = project_each(tape, x, plan.inputs, rows, counts=ops.STATE_PROJECTION)
    values = rows * spec.value_heads * spec.value_dim
    # mx.contiguous copies the state out, so that the padded input does not outlive the call.
    mixed = _convolve(
        tape,
        (made[0], x),
        (spec.conv_dim, spec.kernel),
        call,
        copied=(spec.kernel - 1) * spec.conv_dim,
    )
    queries, keys = (
        norm(tape, mixed, rows * spec.key_heads * spec.key_dim, shared=True) for _ in range(2)
    )
    # normalize_qk multiplies both by a scale after the norm.
    for array in (queries, keys):
        tape.inplace(array)
    # compute_g starts from A_log in float32, and the decays are of the state's type.
    width = _FLOAT32 if spec.float32 else call.width
    decays = rows * spec.value_heads
    gates = tape.allocate((made[-1],), decays, nbytes=decays * width)
    # Values are a strided part, which a custom kernel reads only after a copy.
    copied = tape.allocate((mixed,), values)
    state = spec.value_heads * spec.value_dim * spec.key_dim * call.batch
    old = tape.old_state(state, state * width, exists=call.has_states)
    # gated_delta_update takes gated_delta_ops, a loop over tokens in Python.
    if call.target.backend != "metal" or spec.key_dim % _KERNEL_KEYS:
        repeated = rows * spec.value_heads * spec.key_dim
        if spec.value_heads > spec.key_heads:
            queries, keys = (
                tape.allocate((a,), repeated, counts=ops.REPEATED_HEADS) for a in (queries, keys)
            )
        inputs = (queries, keys, copied, gates)
        output = _token_loop(tape, inputs, old, (state, width), values, call, ops.TOKEN_SUM)
    else:
        # One kernel has two outputs: the values of all tokens and the new state.
        output = tape.allocate((queries, keys, copied, gates, old), values)
        tape.retain(tape.allocate((output,), state, nbytes=state * width, counts=ops.NO_KERNEL))
    output = norm(tape, output, values, shared=True)
    gate = tape.allocate((made[0],), values)
    output = tape.compiled(output, gate)
    return project(tape, output, plan.output, rows, counts=ops.STATE_PROJECTION)


def record_recurrent(tape: Tape, x: int, spec: Recurrent, plan: MixerPlan, call: CallShape) -> int:
    """Record any other recurrence: convolution, mixing and gating at its inner width."""
    rows = call.rows
    made = project_each(tape, x, plan.inputs, rows, counts=ops.STATE_PROJECTION)
    inner = rows * spec.inner_dim
    viewed = sum(state.view_elements for state in spec.state if not state.survives_decode)
    shape = (viewed or spec.inner_dim, spec.kernel)
    mixed = _convolve(tape, tuple(made), shape, call, keep=viewed > 0)
    state_buffer = max(spec.state, key=lambda s: s.elements, default=StateBuffer(0))
    state = state_buffer.elements * call.batch
    width = _FLOAT32 if state_buffer.float32 else call.width
    # One token is one step, whatever form a class has for many; without Metal that of Mamba-2 is
    # its matrix form (mlx-lm models/ssm.py, ssm_update).
    is_matrix = spec.scan is Scan.MATRIX and call.target.backend != "metal"
    scan = spec.scan if call.tokens > 1 or is_matrix else Scan.KERNEL
    match scan:
        case Scan.STACKED:
            output = _stacked_states(tape, mixed, state_buffer, inner, call)
        case Scan.TOKEN_LOOP:
            old = tape.old_state(state, state * width, exists=call.has_states)
            output = _token_loop(tape, (mixed,), old, (state, width), inner, call, ops.TOKEN_INPUTS)
        case Scan.MATRIX:
            output = _ssm_chunks(tape, mixed, spec, call, width)
        case Scan.KERNEL:
            old = tape.old_state(state, state * width, exists=call.has_states)
            output = tape.allocate((mixed, old), inner)
            _kept(tape, (output, old), state, state * width)
        case _:
            assert_never(scan)
    if made:
        output = tape.compiled(output, made[0])
    if spec.normed:
        output = norm(tape, output, inner, shared=False)
    return project(tape, output, plan.output, rows, counts=ops.STATE_PROJECTION)


def _stacked_states(tape: Tape, mixed: int, state: StateBuffer, inner: int, call: CallShape) -> int:
    """Jamba writes each token's state into the array of all, which is copied every time."""
    cells = call.rows * state.elements
    old = tape.existing(call.previous * call.batch * state.view_elements)
    states = tape.allocate(
        (mixed, old), cells, counts=ops.FIRST_STATES, name="states of all tokens"
    )
    decays = tape.allocate((mixed,), cells, counts=ops.STATE_DECAYS, name="states of all tokens")
    for _ in _looped(call):
        step = tape.allocate((states, decays), state.elements * call.batch, counts=ops.STEP_STATE)
        states = tape.allocate(
            (states, step), cells, counts=ops.STATES_WRITTEN, name="states of all tokens"
        )
    tape.retain(states)
    return tape.allocate((states, mixed), inner, counts=ops.STATES_OUTPUT)


def _convolve(
    tape: Tape,
    inputs: tuple[int, ...],
    shape: tuple[int, int],
    call: CallShape,
    *,
    keep: bool = False,
    copied: int = 0,
) -> int:
    """Parts joined, the state put before them, a causal convolution and its activation.

    ``shape`` are the channels and the tokens under the convolution. With ``keep`` the next state is
    a slice of the padded input, which therefore stays; one of ``copied`` elements is cut from it,
    at the end of the call.
    """
    width, kernel = shape
    elements = call.rows * width
    joined = (
        tape.allocate(inputs, elements, counts=ops.CONVOLUTION_INPUT)
        if len(inputs) != 1
        else inputs[0]
    )
    old = tape.existing(call.previous * call.batch * width if keep else 0)
    padded = tape.allocate((joined, old), elements, counts=ops.PADDED_INPUT)
    if keep:
        tape.retain(padded)
    if copied:
        tape.defer(lambda: _kept(tape, (padded,), copied * call.batch))
    temporary, counts = 0, ops.ELEMENTWISE
    if tape.backend == "cpu" and kernel:
        # conv.cpp, explicit_gemm_conv_1D_cpu: the input, all its windows, the weights and, unless
        # it is the result, the product in float32.
        windows = call.batch * (call.tokens + kernel - 1) + (call.rows + 1) * kernel
        product = 0 if call.width == _FLOAT32 else elements
        temporary, counts = (windows * width + product + 1) * _FLOAT32, ops.CPU_CONVOLUTION
    convolved = tape.allocate((padded,), elements, temporary=temporary, counts=counts)
    return tape.compiled(convolved)


def _token_loop(
    tape: Tape,
    inputs: tuple[int, ...],
    old: int,
    state: tuple[int, int],
    output: int,
    call: CallShape,
    counts: ops.OperationCount,
) -> int:
    """One step for each token; ``state`` are the elements of one and the bytes of each element.

    A loop's outputs hang off its chain, so every token's state waits for the end of it. ``counts``
    are of what a step makes in addition to states.
    """
    elements, width = state
    states = []
    for _ in _looped(call):
        product = tape.allocate(
            (*inputs, old), elements, nbytes=elements * width, counts=ops.TOKEN_PRODUCT
        )
        tape.allocate((product,), 1, counts=counts)
        old = tape.allocate((product,), elements, nbytes=elements * width, counts=ops.TOKEN_STATE)
        states.append(old)
        tape.allocate((old,), 1)
    tape.retain(old)
    # The outputs of all tokens are alive until mx.stack has joined them.
    ahead = tape.allocate((), output)
    made = tape.allocate((*inputs, ahead), output, counts=ops.STACKED_OUTPUT)
    others = elements * (call.tokens - len(states))
    name = "states of all tokens"
    # One output after another is made of its state, before any further layer.
    tape.inplace(made, tape.allocate((), others, nbytes=others * width, name=name))
    for each in states:
        tape.inplace(made, each, counts=ops.TOKEN_OUTPUT)
    return made


def _kept(tape: Tape, inputs: tuple[int, ...], elements: int, nbytes: int | None = None) -> None:
    tape.retain(tape.allocate(inputs, elements, nbytes=nbytes))


def _ssm_chunks(tape: Tape, mixed: int, spec: Recurrent, call: CallShape, width: int) -> int:
    """Mamba-2 in its matrix form: decays of every pair of tokens in a chunk; return its output.

    ``width`` are the bytes of an element of the state.
    """
    inner = call.rows * spec.inner_dim
    step = call.tokens if call.target.versions.has("whole_ssm") else _SSM_CHUNK
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


def _looped(call: CallShape) -> range:
    return range(min(call.tokens, _LOOPED_TOKENS[call.target.backend]))
