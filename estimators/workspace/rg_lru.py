"""The operations of a gated linear recurrence (mlx-lm models/recurrent_gemma.py)."""

from memfit.estimators.arch.specs import Recurrent
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.prepared import MixerPlan
from memfit.estimators.workspace.projections import project
from memfit.estimators.workspace.recurrent_steps import convolve, looped
from memfit.estimators.workspace.tape import Tape


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
