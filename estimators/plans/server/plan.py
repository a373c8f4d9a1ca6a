"""The memory of mlx_lm.server for its flags, and the flags that fit."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.server.batch_schedule import (
    BatchSchedule,
    Moment,
    Request,
)
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.server import ServerMoment, ServerPlan, ServerSettings
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.mlx_lm_commands import server_command
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.sizing.actions import converting
from memfit.estimators.sizing.estimate import (
    ALONE,
    assumption_notes,
    device_summary,
    notes_on_versions,
)
from memfit.estimators.sizing.search import PREFILL_STEPS, first_fitting, halves
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.server_memory import ServerMemory, need_of, one_at_a_time
from memfit.estimators.sizing.sized_model import SizedModel

MAX_SIMULATED = 2000


def plan_server(
    sized: SizedModel,
    workload: Workload,
    settings: ServerSettings,
    *,
    clients: int,
    traffic: Sequence[Request] = (),
    units: Units = Units.GB,
) -> ServerPlan:
    """Return what the server takes when ``clients`` always have a request open.

    ``workload`` is every request where there is no ``traffic``.

    Raises:
        InputError: when a request of the traffic is longer than the model's context.
        UnsupportedError: when mlx-lm cannot run the workload.
    """
    requests = tuple(traffic[:MAX_SIMULATED]) or alike(workload, settings, clients)
    check_lengths(sized, requests)
    sequential = one_at_a_time(sized, workload)
    evaluation = _Evaluation(
        sized,
        workload,
        requests,
        clients,
        is_sequential=bool(sequential),
        is_recorded=bool(traffic),
    )
    worst, idle, waited = evaluation.run(settings)
    verdict, _ = judge(need_of(worst), sized.device)
    better = None
    if sized.device and verdict in ("exceeds", "tight"):
        better = first_fitting(tuple(cheaper(settings)), evaluation.fits)
    chosen = better or (settings if verdict in ("fits", "unknown") else None)
    return ServerPlan(
        model=sized.checkpoint.id,
        runtime=runtime_summary(sized.runtime_model.runtime),
        device=device_summary(sized.device) if sized.device else None,
        settings=settings,
        kv_bits=workload.kv_bits,
        requests=len(requests),
        clients=clients,
        longest_prompt_tokens=max(each.prompt_tokens for each in requests),
        longest_generation_tokens=max(each.max_tokens for each in requests),
        sequential=sequential,
        worst=worst,
        bound_bytes=None if traffic else evaluation.bound(settings),
        idle_bytes=idle,
        verdict=verdict,
        waited=waited,
        fitting=better,
        fitting_worst=evaluation.run(better)[0] if better else None,
        commands=tuple(_commands(sized, workload, chosen)) if chosen else (),
        notes=(
            *_notes(sized, settings, sequential, worst, units, len(traffic)),
            *notes_on_versions(sized, workload, units, of=ALONE),
        ),
    )


def alike(workload: Workload, settings: ServerSettings, clients: int) -> tuple[Request, ...]:
    """Return requests of one prompt length that end in different calls, which takes the most."""
    count = 2 * clients + settings.prompt_cache_size
    return tuple(
        Request(workload.prompt_tokens, max(1, workload.max_tokens - number % settings.rows))
        for number in range(min(count, MAX_SIMULATED))
    )


def _commands(sized: SizedModel, workload: Workload, settings: ServerSettings) -> Iterator[str]:
    return converting(sized, lambda model: [server_command(model, workload, settings)])


def cheaper(settings: ServerSettings) -> Iterator[ServerSettings]:
    """Yield settings that take less, those that cost the least speed first."""
    most, kept = settings.decode_concurrency, settings.prompt_cache_size
    for decode in (most, *halves(most, 1)):
        together = min(settings.prompt_concurrency, decode)
        for stored in (kept, *halves(kept, 0)):
            for prompts in (together, *halves(together, 1)):
                for step in PREFILL_STEPS:
                    if step <= settings.prefill_step:
                        yield replace(
                            settings,
                            prefill_step=step,
                            prompt_concurrency=prompts,
                            decode_concurrency=decode,
                            prompt_cache_size=stored,
                        )


class _Evaluation:
    """Settings of one question."""

    def __init__(
        self,
        sized: SizedModel,
        workload: Workload,
        requests: Sequence[Request],
        clients: int,
        *,
        is_sequential: bool,
        is_recorded: bool,
    ) -> None:
        self._sized, self._requests = sized, requests
        self._clients, self._is_sequential = clients, is_sequential
        self._is_recorded = is_recorded
        self._memory = ServerMemory(sized, workload)
        longest = max(requests, key=lambda each: each.prompt_tokens + each.max_tokens)
        lengths = {"prompt_tokens": longest.prompt_tokens, "max_tokens": longest.max_tokens}
        self._bound = ServerBound(sized, replace(workload, **lengths), clients)
        self.run = cache(self._run)

    def fits(self, settings: ServerSettings) -> bool:
        """Whether every moment leaves a tenth of the working set free."""
        if self._is_sequential:
            return self._is_roomy(self.run(settings)[0])
        # Most settings of a search do not fit, which an early moment shows.
        moments, seen = self._schedule(settings).moments(), set[Moment]()
        for each in moments:
            if each not in seen and not self._is_roomy(self._moment(each, settings.prefill_step)):
                return False
            seen.add(each)
        return True

    def _is_roomy(self, moment: ServerMoment) -> bool:
        return judge(need_of(moment), self._sized.device)[0] == "fits"

    def _schedule(self, settings: ServerSettings) -> BatchSchedule:
        return BatchSchedule(
            self._requests,
            settings,
            clients=self._clients,
            at_once=0 if self._is_recorded else self._requests[0].prompt_tokens,
            windows=self._memory.windows,
            has_states=self._memory.has_states,
        )

    def _run(self, settings: ServerSettings) -> tuple[ServerMoment, int, int]:
        """The worst moment, bytes when all requests have ended, and requests that waited."""
        if self._is_sequential:
            waited = len(self._requests) - 1 if self._clients > 1 else 0
            moment = self._bound.moment(settings)
            return moment, moment.weights_bytes + moment.cache_bytes, waited
        schedule = self._schedule(settings)
        moments, step = tuple(schedule.moments()), settings.prefill_step
        # Many moments are equal: each is computed once.
        worst = max(
            (self._moment(each, step) for each in dict.fromkeys(moments)),
            key=lambda moment: moment.peak_bytes,
        )
        last = self._moment(moments[-1], step)
        return worst, last.weights_bytes + last.cache_bytes, schedule.waited

    def bound(self, settings: ServerSettings) -> int | None:
        """What no order of arrivals can exceed, None where requests run one at a time."""
        return None if self._is_sequential else self._bound.moment(settings).peak_bytes

    def _moment(self, moment: Moment, step: int) -> ServerMoment:
        rows = moment.prefilled_rows
        return self._memory.answer(
            sum(map(self._memory.cache_bytes, moment.buffers)),
            prefill=self._memory.prefill(rows, moment.prefilled_tokens, step) if rows else (0, 0),
            logits=self._memory.logits_bytes(moment.running, prefilling=rows > 0),
            prompts=rows,
            decoding=moment.running,
            stored=moment.stored,
        )


def check_lengths(sized: SizedModel, requests: Iterable[Request]) -> None:
    """Check that no request is longer than the model's context.

    Raises:
        InputError: when one is.
    """
    most = sized.model.max_context
    for number, each in enumerate(islice(requests, MAX_SIMULATED), 1):
        if most is not None and each.prompt_tokens + each.max_tokens > most:
            raise InputError(
                f"request {number}: {each.prompt_tokens} + {each.max_tokens} tokens are more than"
                f" the model's context of {most}; shorten it"
            )


def _notes(
    sized: SizedModel,
    settings: ServerSettings,
    sequential: str | None,
    worst: ServerMoment,
    units: Units,
    traffic: int,
) -> Iterator[Note]:
    yield from assumption_notes(sized)
    if sequential:
        yield Note("info", "server-sequential", f"{sequential}: requests run one at a time")
    elif worst.stored_caches:
        yield Note(
            "warning",
            "server-prompt-cache",
            "an entry of the prompt cache is a slice that mlx_lm.server has not computed yet: it"
            " keeps the buffers of its whole batch in memory, more than the server's log counts",
        )
    if settings.prompt_cache_bytes is not None:
        size = format_bytes(settings.prompt_cache_bytes, units)
        yield Note(
            "warning",
            "server-prompt-cache-bytes",
            f"--prompt-cache-bytes {size} is not counted on: the server applies it only when a"
            " request joins a running batch, and to sizes that leave out what entries keep",
        )
    if traffic > MAX_SIMULATED:
        text = f"the first {MAX_SIMULATED} of {traffic} requests are simulated"
        yield Note("info", "server-traffic", text)
