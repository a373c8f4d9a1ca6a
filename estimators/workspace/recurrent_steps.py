"""What recurrences have in common: shifts, convolutions and loops over tokens."""

from collections.abc import Callable

from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
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
