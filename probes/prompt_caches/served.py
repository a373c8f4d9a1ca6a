"""Serve the requests of several conversations under a budget: the parent's part."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.unfinished import unfinished_folder
from memfit.estimators.plans.offload.cache_tiers import Tiers
from memfit.estimators.results.offload import Policy, Speeds
from memfit.probes.disk import unwritable
from memfit.probes.process import ModelProcess
from memfit.probes.prompt_caches.conversations import StoredForm
from memfit.probes.prompt_caches.planned import CachePlan, simulated_differences
from memfit.probes.prompt_caches.result import CacheAnswer, Conversation, Replay, Served
from memfit.probes.prompt_caches.runner import CacheRunner
from memfit.probes.speed import rate


def serve(
    requests: tuple[TraceRequest, ...],
    form: StoredForm,
    room: Tiers,
    plan: CachePlan | None,
    *,
    start: Callable[..., ModelProcess],
    directory: Path,
    speeds: Speeds,
    eviction: tuple[Policy, int | None],
) -> Replay:
    """Run every request in one process, with files in a directory that is removed afterwards.

    ``eviction`` is the policy, and above how many tokens a conversation leaves memory at once.

    Raises:
        InputError: when the directory cannot be written.
        MachineError: when there is too little memory or disk space.
    """
    policy, most_kept = eviction
    longest = max(each.prompt_tokens for each in requests)
    with ExitStack() as stack:
        try:
            own = stack.enter_context(unfinished_folder(directory))
        except OSError as error:
            raise unwritable(directory, error) from None
        process = stack.enter_context(start(task="store caches"))
        process.prompt(None, longest)
        process.load()
        found = process.call(CacheRunner.replay, requests, room, form, own, most_kept)
    run = found.simulation
    planned = plan.simulation(requests, form.bits, room, speeds, most_kept) if plan else None
    return Replay(
        policy=policy,
        threshold_tokens=most_kept or None,
        bits=form.bits,
        way=form.way,
        hot_bytes=room.hot_bytes,
        disk_bytes=room.disk_bytes,
        measured=run,
        planned=planned,
        peak_bytes=found.peak_bytes,
        planned_peak_bytes=planned.largest_hot_bytes + plan.active_bytes(requests, form.bits)
        if plan and planned
        else None,
        served=tuple(
            Served(found=where, requests=count, first_token_ns=total // count)
            for where, total in found.first_token_ns.items()
            if (count := getattr(run, where))
        ),
        differences=simulated_differences(planned, run) if planned else (),
    )


def speeds_of(longest: Conversation, answer: CacheAnswer) -> Speeds:
    """Return the speeds that were measured with the longest conversation, as it is restored."""
    reads, writes = None, None
    for file in longest.stored:
        if file.bits == answer.bits:
            writes = rate(file.file_bytes, file.write_ns)
            spans = (each.restore_ns for each in file.restores if each.way == answer.way)
            reads = rate(file.file_bytes, next(spans, None))
    return Speeds(reads, writes, rate(longest.tokens, longest.prefill_ns))


def of_first(requests: Sequence[TraceRequest], conversations: int) -> tuple[TraceRequest, ...]:
    first = list(dict.fromkeys(each.agent for each in requests))[:conversations]
    return tuple(each for each in requests if each.agent in set(first))
