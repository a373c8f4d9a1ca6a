"""The most memory of speculative decoding: the calls of two models on one device.

Source: mlx_lm/generate.py, speculative_generate_step. The draft model reads the prompt first, then
the target. In each step the draft's calls run into the target's, after which MLX waits.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.call_plan import CHUNKS, DraftRound, planned_rounds, prompt_chunks
from memfit.estimators.trace.call_recorder import checked_tokens, drafted_token
from memfit.estimators.trace.graph_format import Call, Trace
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import Highest, Replay
from memfit.estimators.trace.schedule import unmerged
from memfit.estimators.trace.traced_model import TracedModel


def speculative_peak(
    target: TracedModel,
    draft: TracedModel,
    workload: Workload,
    tokens: int,
    *,
    machine: TraceTarget,
    device: Device,
) -> Highest:
    """Return the highest moment with ``tokens`` drafted in each step, all weights included.

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
    weights = sum(
        allocated(nbytes, device.backend) for each in traces for nbytes in each.weights.values()
    )
    top = max(_moments(*traces, rounds, device), key=lambda moment: moment.nbytes)
    return replace(top, nbytes=weights + top.nbytes, alive=(("weights", weights), *top.alive))


def _moments(
    target: Trace, draft: Trace, rounds: tuple[DraftRound, ...], device: Device
) -> Iterator[Highest]:
    checking = Replay(device, target.mlx_version)
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


def _prompt(run: Replay, trace: Trace) -> Iterator[Highest]:
    reached = 0
    for call in trace.calls:
        if call.phase in CHUNKS:
            yield run.follow(unmerged(call), jumped=call.position != reached)
            run.wait()
            reached = call.position + call.tokens


def _after_prompt(trace: Trace) -> list[Call]:
    return [unmerged(call) for call in trace.calls if call.phase not in CHUNKS]
