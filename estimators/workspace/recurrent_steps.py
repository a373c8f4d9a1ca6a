"""What recurrences have in common, and the operations of some: Mamba-2, gated linear ones, RWKV-7.

Sources: mlx-lm models/ssm.py, ssm_attn; recurrent_gemma.py; rwkv7.py, Rwkv7TimeMixing.
"""

from collections.abc import Callable

from memfit.estimators.arch.specs import Recurrent
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.prepared import MixerPlan, Projection
from memfit.estimators.workspace.projections import project
from memfit.estimators.workspace.tape import Tape

_FLOAT32 = 4
# A loop over tokens in Python repeats itself; more tokens than these are never in flight at once:
# each has three kernels or more, and there are eleven batches (mlx/data/scheduling.py).
_LOOPED_TOKENS = {"cpu": 40, "metal": 190, "cuda": 380}


def token_shift(tape: Tape, x: int, call: CallShape) -> int:
    """Record the difference to the token before each; the next call needs the last one.

    The cache holds it as a slice of ``x``, which therefore stays (mlx-lm rwkv7.py, TokenShift).
    """
    elements = tape.elements[x]
    old = tape.existing(call.previous * elements // call.tokens)
    shifted = tape.allocate((tape.retain(x), old), elements, counts=ops.PADDED_INPUT)
    return tape.inplace(shifted, x)


def convolve(
    tape: Tape,
    inputs: tuple[int, ...],
    shape: tuple[int, int],
    call: CallShape,
    *,
    keep: bool = False,
    copied: int = 0,
    acts: bool = True,
) -> int:
    """Parts joined, the state put before them, a causal convolution and, if it ``acts``, silu.

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
        tape.defer(lambda: kept(tape, (padded,), copied * call.batch))
    temporary, counts = 0, ops.ELEMENTWISE
    if tape.backend == "cpu" and kernel:
        # conv.cpp, explicit_gemm_conv_1D_cpu: the input, all its windows, the weights and, unless
        # it is the result, the product in float32.
        windows = call.batch * (call.tokens + kernel - 1) + (call.rows + 1) * kernel
        product = 0 if call.width == _FLOAT32 else elements
        temporary, counts = (windows * width + product + 1) * _FLOAT32, ops.CPU_CONVOLUTION
    convolved = tape.allocate((padded,), elements, temporary=temporary, counts=counts)
    return tape.compiled(convolved) if acts else convolved


def token_loop(
    tape: Tape,
    step: Callable[[int], tuple[int, int]],
    old: int,
    output: int,
    call: CallShape,
    counts: ops.OperationCount,
) -> int:
    """A step for each token, from its old state to the new one and what its output is made of.

    A loop's outputs hang off its chain, so what all of them are made of waits for the end of it.
    ``counts`` are of one output.
    """
    each, steps = output // call.tokens, looped(call)
    sources = []
    for _ in steps:
        old, source = step(old)
        sources.append(source)
    tape.retain(old)
    outputs = []
    # The tokens that are not followed one by one came before the others.
    if earlier := call.tokens - len(steps):
        elements, nbytes = (earlier * of[sources[0]] for of in (tape.elements, tape.nbytes))
        others = tape.allocate((), elements, nbytes=nbytes, name="states of all tokens")
        outputs.append(tape.allocate((others,), output - len(steps) * each))
    # One output after another is made, before any further layer.
    outputs += [tape.allocate((source,), each, counts=counts) for source in sources]
    # mx.stack: a copy of each.
    return tape.allocate(tuple(outputs), output, counts=ops.repeated(len(outputs)))


def looped(call: CallShape) -> range:
    """Return the tokens of a loop that are followed one by one: the last ones of a long call."""
    return range(min(call.tokens, _LOOPED_TOKENS[call.target.backend]))


def kept(tape: Tape, inputs: tuple[int, ...], elements: int, nbytes: int | None = None) -> None:
    """Record a state of ``nbytes`` that outlives the call, by default of the model's type."""
    tape.retain(tape.allocate(inputs, elements, nbytes=nbytes))


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


def record_rg_lru(tape: Tape, x: int, spec: Recurrent, plan: MixerPlan, call: CallShape) -> int:
    """Record RecurrentBlock on its normed input; return its output."""
    rows, wide = call.rows, call.rows * spec.inner_dim
    gate, into = plan.inputs
    mixed = project(tape, x, into, rows)
    mixed = convolve(tape, (mixed,), (spec.inner_dim, spec.kernel), call, keep=True)
    decays = _gate(tape, mixed, wide)
    # Times a number and the parameter.
    for _ in range(2):
        tape.inplace(decays)
    # The square of the decay, and from it the input's weight: exp, 1 - x, sqrt.
    weights = tape.allocate((decays,), wide)
    for _ in range(3):
        tape.inplace(weights)
    gated = tape.inplace(_gate(tape, mixed, wide), mixed)
    decays = tape.allocate((decays,), wide)
    gated = tape.inplace(gated, weights)
    output = _scan(tape, gated, decays, spec, call)
    branch = project(tape, x, gate, rows)
    # gelu_approx is two kernels.
    acted = tape.compiled(tape.allocate((branch,), wide), branch)
    return project(tape, tape.inplace(acted, output), plan.output, rows)


def _gate(tape: Tape, x: int, wide: int) -> int:
    """A product for each head, a sum with its bias that has the tokens first, and a sigmoid."""
    product = tape.allocate((x,), wide, counts=ops.HEAD_PRODUCTS)
    return tape.inplace(tape.allocate((product,), wide))


def _scan(tape: Tape, x: int, decays: int, spec: Recurrent, call: CallShape) -> int:
    """A loop over tokens that writes each into the array of all (rnn_scan)."""
    wide, each = call.rows * spec.inner_dim, call.batch * spec.inner_dim
    zeros = tape.allocate((), wide)
    made = tape.allocate((zeros,), wide)
    state = tape.old_state(each, each * call.width, exists=call.has_states)
    for _ in looped(call):
        state = tape.allocate((x, decays, state), each, counts=ops.DECAYED_TOKEN)
        tape.inplace(made, state)
    tape.retain(state)
    return made


def record_wkv(tape: Tape, x: int, spec: Recurrent, plan: MixerPlan, call: CallShape) -> int:
    """Record the mixing on its normed input; return its output."""
    rows = call.rows
    wide = rows * spec.inner_dim
    receptance, key, value, *low_rank = plan.inputs
    decay, *values_mix, rate, gate = zip(low_rank[::2], low_rank[1::2], strict=True)
    shifted = token_shift(tape, x, call)

    def mixed() -> int:
        # x + shifted * weight, six times: the device still reads what it could be written over.
        return tape.allocate((x, shifted), wide)

    def adapted(given: int, pair: tuple[Projection, Projection]) -> int:
        # One of the two products has an activation; of the decays both have one.
        low = tape.inplace(project(tape, given, pair[0], rows))
        return project(tape, low, pair[1], rows)

    decays = tape.inplace(adapted(mixed(), decay))
    wider = tape.allocate((decays,), wide, nbytes=wide * _FLOAT32)
    # Multiplied and put through exp in float32.
    for _ in range(2):
        tape.inplace(wider)
    decays = tape.allocate((wider,), wide)
    rates = adapted(mixed(), rate)
    keys = project(tape, mixed(), key, rows)
    given = mixed()
    values = project(tape, given, value, rows)
    if values_mix:
        # Values of the first layer are mixed in, by a compiled sum.
        rest = tape.allocate((values,), wide)
        values = tape.compiled(adapted(given, values_mix[0]), values, rest)
    queries = project(tape, mixed(), receptance, rows)
    gates = adapted(mixed(), gate)
    # Normed keys: squares, their sums and the quotient.
    plain = tape.allocate((keys,), wide)
    squares = tape.allocate((plain,), wide)
    normed = tape.allocate((plain, squares), wide, counts=ops.KEYS_NORMED)
    # What is left of the rate, times a weight and the keys.
    left = tape.allocate((rates,), wide)
    for others in ((), (), (keys,)):
        tape.inplace(left, *others)
    removed = tape.allocate((normed,), wide)
    added = tape.allocate((normed, rates), wide)
    bonus = tape.allocate((queries, left), wide)
    inputs = (queries, decays, left, values, removed, added)
    output = _wkv(tape, inputs, spec, call)
    # The norm of each head, its weight and its bias.
    for _ in range(3):
        tape.inplace(output)
    tape.inplace(bonus)
    output = tape.inplace(tape.allocate((bonus, values), wide, counts=ops.BONUS), output)
    return project(tape, tape.inplace(output, gates), plan.output, rows)


def _wkv(tape: Tape, inputs: tuple[int, ...], spec: Recurrent, call: CallShape) -> int:
    wide, state = call.rows * spec.inner_dim, spec.state[1].elements * call.batch
    old = tape.old_state(state, state * call.width, exists=call.has_states)
    if call.target.backend != "metal":

        def step(old: int) -> tuple[int, int]:
            # What is removed is two products of the state, what is added one; one kernel sums them.
            sums = tape.allocate((*inputs, old), wide // call.tokens)
            removed = tape.allocate((sums,), state)
            added = tape.allocate(inputs, state)
            new = tape.compiled(removed, added, old)
            return new, new

        return token_loop(tape, step, old, wide, call, ops.ELEMENTWISE)
    # One kernel has two outputs: the values of all tokens and the new state.
    output = tape.allocate((*inputs, old), wide)
    tape.retain(tape.allocate((output,), state, counts=ops.NO_KERNEL))
    return output
