"""The most memory of a run of mlx-lm, by following its recorded calls: with a draft model or alone.

Source of speculative decoding: mlx_lm/generate.py, speculative_generate_step. The draft model reads
the prompt first, then the target. In each step the draft's calls run into the target's, after which
MLX waits.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple

from msgspec import Struct

from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import CHUNKS, DraftRound, planned_rounds, prompt_chunks
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.mlx.versions import Version
from memfit.estimators.trace.call_recorder import checked_tokens, drafted_token
from memfit.estimators.trace.graph_format import Call, Trace
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.replay import CallPeak, CallReplay, Part, sample_of
from memfit.estimators.trace.schedule import unmerged
from memfit.estimators.trace.traced_model import TracedModel


class RunPeak(Struct, Generic[Part], frozen=True):
    """The most in use during a run, weights included."""

    nbytes: int
    top: CallPeak[Part]
    """The evaluation that reaches it."""
    parts: Mapping[Part, int]
    """The most bytes in use during each part of the run."""
    weight_bytes: int
    """The weights, each rounded as the allocator does."""
    workspace_bytes: int
    """What of the peak is neither weights nor the caches as the run leaves them."""
    held: Mapping[Part, int]
    """The most bytes in use and kept for reuse together during each part, without a limit."""
    largest_buffer_bytes: int
    alive: tuple[tuple[str, int], ...]
    """Bytes in use at the peak, by name: the weights, then the most first."""
    calls: tuple[CallPeak[Part], ...]
    """The evaluations in their order, without the weights."""


def run_peak(
    calls: Iterable[CallPeak[Part]],
    weights: Mapping[Any, int],
    device: Device,
    *,
    kept_bytes: int = 0,
    largest_kept: int = 0,
) -> RunPeak[Part]:
    """Return the most in use during a run of these evaluations.

    ``kept_bytes`` are those of caches and states when it ends, ``largest_kept`` those of the
    largest.
    """
    calls = tuple(calls)
    # Each parameter is an allocation of its own, so each is rounded up.
    weight_bytes = sum(allocated(nbytes, device.backend) for nbytes in weights.values())
    # The weights are alive all the time, so they do not change which moment is the top.
    top = max(calls, key=lambda call: call.nbytes)
    parts: dict[Part, int] = {}
    held: dict[Part, int] = {}
    for call in calls:
        parts[call.part] = max(parts.get(call.part, 0), weight_bytes + call.nbytes)
        held[call.part] = max(held.get(call.part, 0), weight_bytes + call.held_bytes)
    return RunPeak(
        nbytes=weight_bytes + top.nbytes,
        top=top,
        parts=parts,
        weight_bytes=weight_bytes,
        workspace_bytes=max(0, top.nbytes - kept_bytes),
        held=held,
        largest_buffer_bytes=max(
            largest_kept, *weights.values(), *(call.largest_buffer_bytes for call in calls)
        ),
        alive=(("weights", weight_bytes), *top.alive),
        calls=calls,
    )


class Start(NamedTuple):
    """The first chunk of a run on a device, followed once for all runs that begin with it."""

    call: Call
    peak: CallPeak[CallPhase]
    held: tuple[View, ...]
    """What it leaves in the caches."""


def followed_start(trace: Trace, device: Device) -> Start | None:
    """Return the first chunk of a trace, None where others cannot begin with it."""
    call = trace.calls[0]
    # The CPU closes its tasks wherever calls begin, so that what follows depends on their count.
    if call.phase not in CHUNKS or device.backend == "cpu":
        return None
    run = CallReplay(device, trace.mlx_version)
    first = run.follow(unmerged(call), jumped=True)
    run.wait()
    held = run.caches()
    return Start(call, first, held) if held else None


def peak(
    trace: Trace,
    device: Device,
    start: Start | None = None,
    *,
    kept_bytes: int | None = None,
    largest_kept: int = 0,
) -> RunPeak[CallPhase]:
    """Return the largest moment of a traced run on a device, which may begin with a ``start``.

    ``kept_bytes`` are those of caches and states when the run ends, ``largest_kept`` those of the
    largest. Without them they are as the last call leaves them.
    """
    kept_bytes = _kept(trace.calls[-1]) if kept_bytes is None else kept_bytes
    calls = _calls(trace, device, start)
    return run_peak(calls, trace.weights, device, kept_bytes=kept_bytes, largest_kept=largest_kept)


def load_peak(
    call: Call, device: Device, mlx_version: Version, *, after_others: bool = False
) -> int:
    """Return the most bytes in use while a model is loaded, its weights included.

    ``after_others`` is for a call that is not the first of its process.
    """
    run = CallReplay(device, mlx_version, after_others=after_others)
    return run.follow(unmerged(call)).nbytes


def _kept(call: Call) -> int:
    """Return the bytes of caches and states when a call has ended."""
    kept = set(call.held).difference(sample_of(call))
    return sum(call.arrays[position].nbytes for position in kept)


def _calls(trace: Trace, device: Device, start: Start | None) -> Iterator[CallPeak[CallPhase]]:
    run = CallReplay(device, trace.mlx_version)
    reached = -1
    last = trace.calls[-1].position
    first_token = next((c.position for c in trace.calls if c.phase not in CHUNKS), last)
    for call in trace.calls:
        jumped = call.position != reached
        reached = call.position + call.tokens
        if start and call is start.call:
            run.resume(start.held)
            yield start.peak
            continue
        yield run.follow(unmerged(call), jumped=jumped, sampled=max(0, call.position - first_token))
        # mx.eval waits after a chunk; mx.async_eval after a token does not (generate_step).
        if call.phase in CHUNKS:
            run.wait()


def speculative_peak(
    target: TracedModel,
    draft: TracedModel,
    workload: Workload,
    tokens: int,
    *,
    machine: TraceTarget,
    device: Device,
) -> RunPeak[CallPhase]:
    """Return the largest moment with ``tokens`` drafted in each step, with both models' weights.

    Raises:
        GraphError: when the graphs of the calls cannot be recorded.
    """
    chunks, rounds = prompt_chunks(workload), planned_rounds(workload, tokens)
    drafted = [call for each in rounds for call in each.drafted]
    checked = [each.checked for each in rounds]
    traces = (
        target.record_planned(workload, machine, [*chunks, *checked], checked_tokens),
        draft.record_planned(workload, machine, [*chunks, *drafted], drafted_token),
    )
    weights = {
        (model, path): nbytes
        for model, trace in enumerate(traces)
        for path, nbytes in trace.weights.items()
    }
    return run_peak(_speculative_calls(*traces, rounds, device), weights, device)


def _speculative_calls(
    target: Trace, draft: Trace, rounds: tuple[DraftRound, ...], device: Device
) -> Iterator[CallPeak[CallPhase]]:
    checking = CallReplay(device, target.mlx_version)
    drafting = checking.alongside()
    for run, trace in ((drafting, draft), (checking, target)):
        yield from _prompt(run, trace)
    checked, drafted = (iter(_after_prompt(trace)) for trace in (target, draft))
    for index, planned in enumerate(rounds):
        # The caller holds a row of the step before, which keeps those of all its tokens.
        check = checking.place(next(checked), jumped=True, held=min(1, index))
        first, *others = [next(drafted) for _ in planned.drafted]
        yield drafting.run(drafting.place(first))
        for _ in range(planned.checked.tokens - 2):
            yield drafting.run(drafting.place(others[0]))
        yield checking.run(check)


def _prompt(run: CallReplay, trace: Trace) -> Iterator[CallPeak[CallPhase]]:
    reached = 0
    for call in trace.calls:
        if call.phase in CHUNKS:
            yield run.follow(unmerged(call), jumped=call.position != reached)
            run.wait()
            reached = call.position + call.tokens


def _after_prompt(trace: Trace) -> list[Call]:
    return [unmerged(call) for call in trace.calls if call.phase not in CHUNKS]
