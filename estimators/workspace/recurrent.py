"""The operations of recurrences: gated delta nets, Mamba and those like it."""

from typing import Literal

from memfit.estimators.arch.specs import GatedDelta, Recurrent, Scan, StateBuffer
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.prepared import MixerPlan
from memfit.estimators.workspace.projections import norm, project, project_each
from memfit.estimators.workspace.recurrent_steps import (
    convolve,
    kept,
    looped,
    record_mamba2,
    record_rg_lru,
    record_wkv,
    token_loop,
)
from memfit.estimators.workspace.tape import Tape

_FLOAT32 = 4
# Metal's kernel of gated delta nets takes keys of multiples of this width.
_KERNEL_KEYS = 32


def record_gated_delta(
    tape: Tape, x: int, spec: GatedDelta, plan: MixerPlan, call: CallShape
) -> int:
    """Record a gated delta net (mlx-lm models/qwen3_next.py, gated_delta.py)."""
    rows = call.rows
    # What is only read after the convolution is made after it: MLX walks the graph from its end.
    first, *later = plan.inputs
    made = project_each(tape, x, (first,), rows, counts=ops.STATE_PROJECTION)
    values = rows * spec.value_heads * spec.value_dim
    # mx.contiguous copies the state out, so that the padded input does not outlive the call.
    mixed = convolve(
        tape,
        (made[0], x),
        (spec.conv_dim, spec.kernel),
        call,
        copied=(spec.kernel - 1) * spec.conv_dim,
    )
    made += project_each(tape, x, later, rows, counts=ops.STATE_PROJECTION)
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
        each, nbytes = values // call.tokens, state * width

        def step(old: int) -> tuple[int, int]:
            decayed = tape.compiled(old, gates)
            product = tape.allocate((keys, decayed), state, nbytes=nbytes, counts=ops.TOKEN_PRODUCT)
            sums = tape.compiled(tape.allocate((product,), each), copied, gates)
            # One kernel makes the new state and its product with the queries; the output is the
            # sum of that.
            new = tape.allocate((decayed, keys, sums, queries), state, nbytes=nbytes)
            return new, tape.allocate((sums,), state, nbytes=nbytes, counts=ops.NO_KERNEL)

        output = token_loop(tape, step, old, values, call, ops.TOKEN_SUM)
    else:
        # One kernel has two outputs: the values of all tokens and the new state.
        output = tape.allocate((queries, keys, copied, gates, old), values)
        tape.retain(tape.allocate((output,), state, nbytes=state * width, counts=ops.NO_KERNEL))
    output = norm(tape, output, values, shared=True)
    gate = tape.allocate((made[0],), values)
    output = tape.compiled(output, gate)
    return project(tape, output, plan.output, rows, counts=ops.STATE_PROJECTION)


def record_recurrent(tape: Tape, x: int, spec: Recurrent, plan: MixerPlan, call: CallShape) -> int:
    """Record any other recurrence on its normed input; return its output."""
    match spec.scan:
        case Scan.WKV:
            return record_wkv(tape, x, spec, plan, call)
        case Scan.RG_LRU:
            return record_rg_lru(tape, x, spec, plan, call)
        case Scan.CONVOLUTION:
            return _short_convolution(tape, x, spec, plan, call)
        case Scan.KERNEL | Scan.TOKEN_LOOP | Scan.STACKED | Scan.MATRIX as scan:
            # One token is one step, whatever form a class has for many; without Metal that of
            # Mamba-2 is its matrix form (mlx-lm models/ssm.py, ssm_update).
            is_matrix = scan is Scan.MATRIX and call.target.backend != "metal"
            is_step = call.tokens == 1 and not is_matrix
            return _convolved(tape, x, spec, plan, call, Scan.KERNEL if is_step else scan)
        case _:
            assert_never(spec.scan)


def _short_convolution(
    tape: Tape, x: int, spec: Recurrent, plan: MixerPlan, call: CallShape
) -> int:
    """Record two gates, one before and one after a convolution (mlx-lm lfm2.py, ShortConv)."""
    (into,) = plan.inputs
    parts = project(tape, x, into, call.rows, counts=ops.STATE_PROJECTION)
    width = spec.state[0].view_elements
    gated = tape.allocate((parts,), call.rows * width, counts=ops.PART_COPY)
    shape = (width, spec.kernel)
    output = convolve(tape, (gated,), shape, call, keep=True, acts=False)
    output = tape.inplace(output, parts)
    return project(tape, output, plan.output, call.rows, counts=ops.STATE_PROJECTION)


_Convolved = Literal[Scan.KERNEL, Scan.TOKEN_LOOP, Scan.STACKED, Scan.MATRIX]


def _convolved(
    tape: Tape, x: int, spec: Recurrent, plan: MixerPlan, call: CallShape, scan: _Convolved
) -> int:
    """Record a convolution, mixing and gating at the recurrence's inner width."""
    rows = call.rows
    # Mamba's loop has the products of its time steps for each token.
    inputs = plan.inputs[:1] if scan is Scan.TOKEN_LOOP else plan.inputs
    made = project_each(tape, x, inputs, rows, counts=ops.STATE_PROJECTION)
    inner = rows * spec.inner_dim
    viewed = sum(state.view_elements for state in spec.state if not state.survives_decode)
    shape = (viewed or spec.inner_dim, spec.kernel)
    mixed = convolve(tape, tuple(made), shape, call, keep=viewed > 0)
    state_buffer = max(spec.state, key=lambda s: s.elements, default=StateBuffer(0))
    state = state_buffer.elements * call.batch
    width = _FLOAT32 if state_buffer.float32 else call.width
    match scan:
        case Scan.STACKED:
            output = _stacked_states(tape, mixed, state_buffer, inner, call)
        case Scan.TOKEN_LOOP:
            old = tape.old_state(state, state * width, exists=call.has_states)
            output = _mamba_loop(tape, mixed, old, state, inner, call)
        case Scan.MATRIX:
            output = record_mamba2(tape, mixed, spec, call, width)
        case Scan.KERNEL:
            old = tape.old_state(state, state * width, exists=call.has_states)
            output = tape.allocate((mixed, old), inner)
            kept(tape, (output, old), state, state * width)
        case _:
            assert_never(scan)
    if made:
        output = tape.compiled(output, made[0])
    if spec.normed:
        output = norm(tape, output, inner, shared=False)
    return project(tape, output, plan.output, rows, counts=ops.STATE_PROJECTION)


def _mamba_loop(tape: Tape, mixed: int, old: int, state: int, inner: int, call: CallShape) -> int:
    def step(old: int) -> tuple[int, int]:
        # Both the time step and its product with the input.
        times = tape.allocate((mixed,), 2 * inner // call.tokens, counts=ops.TOKEN_TIME_STEP)
        decayed = tape.allocate((times, old), state, counts=ops.DECAYED_STATE)
        new = tape.allocate((times, decayed), state, counts=ops.TOKEN_STATE)
        return new, new

    return token_loop(tape, step, old, inner, call, ops.TOKEN_OUTPUT)


def _stacked_states(tape: Tape, mixed: int, state: StateBuffer, inner: int, call: CallShape) -> int:
    """Jamba writes each token's state into the array of all, which is copied every time."""
    cells = call.rows * state.elements
    old = tape.existing(call.previous * call.batch * state.view_elements)
    states = tape.allocate(
        (mixed, old), cells, counts=ops.FIRST_STATES, name="states of all tokens"
    )
    decays = tape.allocate((mixed,), cells, counts=ops.STATE_DECAYS, name="states of all tokens")
    for _ in looped(call):
        step = tape.allocate((states, decays), state.elements * call.batch, counts=ops.STEP_STATE)
        states = tape.allocate(
            (states, step), cells, counts=ops.STATES_WRITTEN, name="states of all tokens"
        )
    tape.retain(states)
    return tape.allocate((states, mixed), inner, counts=ops.STATES_OUTPUT)
