"""``memfit replay``: recorded or generated traffic before a guard, without a model in memory."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.guard.guard import Guard
from memfit.estimators.guard.schedule import GuardedSchedule
from memfit.estimators.mlx.arrivals import Arrivals, AtTimes, ClosedLoop, ServedRequest
from memfit.estimators.mlx.batch_schedule import ScheduleMoment
from memfit.estimators.results.replay import RefusedRequest, Replay, ReplayMoment
from memfit.estimators.results.result import both_units

MAX_REPLAYED = 20_000
_SPANS = 40
_SLACK_TOKENS = 768
"""Three steps of a cache: the guard counts one more for what a batch keeps when rows leave it, one
for the next and one for a short chunk; a request that fits by less is not refused wrongly."""


def replay(
    guard: Guard,
    requests: Sequence[TraceRequest],
    *,
    traffic: str,
    clients: int = 8,
    times: Sequence[tuple[float, float]] = (),
    prompt_cache_size: int = 10,
) -> Replay:
    """Return what happens to requests that ``clients`` send one after the other, or at ``times``.

    Raises:
        InputError: when there are more than ``MAX_REPLAYED``.
    """
    if len(requests) > MAX_REPLAYED:
        raise InputError(f"{len(requests)} requests: replay {MAX_REPLAYED} at most at a time")
    served, longest = served_requests(requests)
    arrivals: Arrivals = AtTimes(served, times) if times else ClosedLoop(clients)
    schedule = GuardedSchedule(
        served, longest, guard, arrivals, prompt_cache_size=prompt_cache_size
    )
    timeline = _Timeline(schedule)
    for moment in schedule.moments():
        timeline.add(moment)
    refused = tuple(_refused(schedule, served, longest))
    return both_units(
        Replay(
            model=guard.tables.model,
            traffic=traffic,
            limit_bytes=guard.limit_bytes,
            weights_bytes=guard.tables.weights_bytes,
            settings=ServerSettings(
                prefill_step=guard.prefill_step,
                prompt_concurrency=guard.prompt_concurrency,
                decode_concurrency=guard.decode_concurrency,
                prompt_cache_size=prompt_cache_size,
            ),
            requests=len(requests),
            calls=schedule.calls,
            peak_bytes=timeline.peak_bytes,
            over=timeline.over,
            refused_though_fits=sum(
                _runs_alone(guard, served[number], longest[number]) for number in schedule.refused
            ),
            refused=refused,
            waited=len(schedule.waits),
            waited_in_vain=len(schedule.waits_in_vain),
            cached=schedule.hits,
            evicted=schedule.evicted,
            not_stored=schedule.not_stored,
            timeline=timeline.moments(),
            notes=tuple(_notes(requests, has_times=bool(times), guard=guard)),
        )
    )


def served_requests(requests: Sequence[TraceRequest]) -> tuple[list[ServedRequest], list[int]]:
    """Return what the server is sent with the replies it gives, and the longest replies."""
    sessions: dict[str, int] = {}
    served, longest = [], []
    for each in requests:
        text = sessions.setdefault(each.session, len(sessions)) if each.session else None
        reply = max(1, each.completion_tokens)  # the server generates one token at least
        served.append(ServedRequest(each.prompt_tokens, reply, text=text))
        longest.append(max(reply, each.max_tokens))
    return served, longest


class _Timeline:
    """The moments of a schedule, and of each span of calls the one with the most memory."""

    def __init__(self, schedule: GuardedSchedule) -> None:
        self._schedule = schedule
        self._spans: dict[int, ReplayMoment] = {}
        self._width = 1
        self.peak_bytes = self.over = 0

    def add(self, moment: ScheduleMoment) -> None:
        schedule = self._schedule
        nbytes = schedule.bytes_of(moment)
        self.peak_bytes = max(self.peak_bytes, nbytes)
        self.over += nbytes > schedule.limit_bytes
        span = schedule.calls // self._width
        if span in self._spans and _total(self._spans[span]) >= nbytes:
            return
        stored = schedule.stored_bytes()
        self._spans[span] = ReplayMoment(
            call=schedule.calls,
            running_bytes=nbytes - stored,
            stored_bytes=stored,
            waiting_bytes=schedule.queue.waiting_bytes,
            running=schedule.running,
            waiting=len(schedule.queue.waiting),
            stored=moment.stored,
        )
        while len(self._spans) > 2 * _SPANS:
            self._merge()

    def _merge(self) -> None:
        self._width *= 2
        spans: dict[int, ReplayMoment] = {}
        for each in self._spans.values():
            span = each.call // self._width
            spans[span] = max(spans.get(span, each), each, key=_total)
        self._spans = spans

    def moments(self) -> tuple[ReplayMoment, ...]:
        """Return at most twice `_SPANS` of them."""
        return tuple(self._spans.values())


def _total(moment: ReplayMoment) -> int:
    return moment.running_bytes + moment.stored_bytes


def _refused(
    schedule: GuardedSchedule, served: Sequence[ServedRequest], longest: Sequence[int]
) -> Iterator[RefusedRequest]:
    for number, refusal in sorted(schedule.refused.items()):
        yield RefusedRequest(
            request=number + 1,
            prompt_tokens=served[number].prompt_tokens,
            max_tokens=longest[number],
            reason=refusal.reason,
            largest_prompt_tokens=refusal.largest_prompt,
        )


def _runs_alone(guard: Guard, request: ServedRequest, reply: int) -> bool:
    """Whether a request alone stays below the limit, with the stated error of the figures.

    Its schedule is followed call by call, with the smallest step, behind a guard without a limit.
    """
    tables, step = guard.tables, min(128, guard.prefill_step)
    if request.prompt_tokens + reply > tables.max_tokens:
        return False
    free = replace(guard, limit_bytes=2**62, prefill_step=step)
    alone = ServedRequest(request.prompt_tokens, reply)
    schedule = GuardedSchedule([alone], [reply], free, ClosedLoop(1), prompt_cache_size=0)
    peak = max(schedule.bytes_of(moment, tables) for moment in schedule.moments())
    return peak + tables.row_bytes(_SLACK_TOKENS) <= guard.limit_bytes


def _notes(requests: Sequence[TraceRequest], *, has_times: bool, guard: Guard) -> Iterator[str]:
    if not any(each.max_tokens for each in requests):
        yield (
            "the traffic has no column max_tokens: the guard knows each reply's length, which a"
            " server does not"
        )
    if not has_times:
        yield "the traffic has no times: each client sends its next request after a reply"
    yield (
        "stored caches are evaluated and batches copied layer by layer, as memfit serve does;"
        f" {guard.tables.model} alone takes {open_size(guard.tables.load_bytes)} while it loads"
    )
