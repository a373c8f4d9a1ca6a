"""The operations of RWKV-7's time mixing (mlx-lm models/rwkv7.py, Rwkv7TimeMixing)."""

from memfit.estimators.arch.specs import Recurrent
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.prepared import MixerPlan, Projection
from memfit.estimators.workspace.projections import project
from memfit.estimators.workspace.recurrent_steps import token_loop, token_shift
from memfit.estimators.workspace.tape import Tape

_FLOAT32 = 4


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
