"""The memory of mlx_lm.server for its flags, and the flags that fit."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import islice

from msgspec.structs import replace

from memfit.estimators.arch.caches import STEP, Growth
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units, ceil_div, format_bytes, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.batch_groups import buffer_bytes, prefilled_alone
from memfit.estimators.mlx.batch_schedule import (
    NAMED_BUFFERS,
    BatchSchedule,
    Buffer,
    Moment,
    Request,
)
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.server import ServerMoment, ServerPlan, ServerSettings
from memfit.estimators.runtimes.budget import Need, judge
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


def one_at_a_time(sized: SizedModel, workload: Workload) -> str | None:
    """Return why the server runs one request at a time, None where it batches (server.py)."""
    if workload.kv_bits is not None:
        return "KV bits switch batching off"
    if sized.draft:
        return "a draft model switches batching off"
    # Their classes have no merge() (server.py, ModelProvider._load).
    if any(b.growth in (Growth.CHUNKED, Growth.ROWS) for b in sized.model.kv_buffers()):
        return "a cache in chunks or compressed rows cannot be batched"
    return None


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
    """Settings of one question; figures of equal moments are computed once."""

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
        self._sized, self._workload, self._requests = sized, workload, requests
        self._clients, self._is_sequential = clients, is_sequential
        self._buffers = sized.model.kv_buffer_counts
        self._is_recorded = is_recorded
        self._cache_bytes = cache(partial(buffer_bytes, sized.model, workload))
        self._prefill_bytes = cache(self._prefill_bytes_of)
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
            windows=self._windows(),
            has_states=any(self._sized.model.states()),
        )

    def _run(self, settings: ServerSettings) -> tuple[ServerMoment, int, int]:
        """The worst moment, bytes when all requests have ended, and requests that waited."""
        if self._is_sequential:
            waited = len(self._requests) - 1 if self._clients > 1 else 0
            return *self._alone(settings), waited
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
        """What no order of arrivals can exceed, None where requests run one at a time.

        Every entry of the prompt cache, and each of the variables that `BatchSchedule` names, then
        has a batch of its own, as long as the longest request.
        """
        if self._is_sequential:
            return None
        step = settings.prefill_step
        rows = min(settings.rows + settings.prompt_concurrency, self._clients)
        prompt = max(each.prompt_tokens for each in self._requests) + step
        tokens = max(each.prompt_tokens + each.max_tokens for each in self._requests) + step
        windows = tuple((limit, limit - 1 + step) for limit in self._windows())
        buffer = Buffer(rows, windows, tokens, round_up(tokens, STEP) + STEP, viewed=step)
        count = settings.prompt_cache_size + NAMED_BUFFERS
        moment = Moment(
            (buffer,) * count, min(rows, settings.prompt_concurrency), prompt, running=rows
        )
        return self._moment(moment, step).peak_bytes

    def _windows(self) -> set[int]:
        return {buffer.limit for buffer in self._buffers if buffer.limit}

    def _moment(self, moment: Moment, step: int) -> ServerMoment:
        held = sum(map(self._cache_bytes, moment.buffers))
        rows, prefill = moment.prefilled_rows, (0, 0)
        if rows:
            prefill = self._prefill_bytes(rows, moment.prefilled_tokens, step)
        # GenerationBatch keeps the log-probabilities of two steps (generate.py, _step); a step
        # computes them from logits and their difference.
        model = self._sized.model
        logits = dtypes.nbytes(moment.running * model.vocab_size, model.dtype)
        return self._answer(held, prefill, moment, logits * (2 if rows else 4))

    def _answer(
        self, held: int, prefill: tuple[int, int], moment: Moment, logits: int = 0
    ) -> ServerMoment:
        sized = self._sized
        nbytes, error = prefill
        return ServerMoment(
            peak_bytes=sized.resident_bytes + held + logits + nbytes + sized.margin_bytes,
            weights_bytes=sized.resident_bytes,
            cache_bytes=held,
            logits_bytes=logits,
            prefill_bytes=nbytes,
            prefill_error_bytes=error,
            margin_bytes=sized.margin_bytes,
            prefilled_prompts=moment.prefilled_rows,
            decoding_requests=moment.running,
            stored_caches=moment.stored,
        )

    def _alone(self, settings: ServerSettings) -> tuple[ServerMoment, int]:
        """One request runs, and its cache is stored as it is (server.py, _serve_single)."""
        longest = max(self._requests, key=lambda each: each.prompt_tokens + each.max_tokens)
        workload = replace(
            self._workload,
            prompt_tokens=longest.prompt_tokens,
            max_tokens=longest.max_tokens,
            prefill_step=settings.prefill_step,
        )
        sized, figures = self._sized, self._sized.figures_for(workload)
        stored = min(settings.prompt_cache_size, len(self._requests))
        kept = stored * (figures.kv.nbytes + figures.ssm_bytes)
        run = figures.moment.nbytes + sized.draft_bytes(workload) - sized.resident_bytes
        error = sized.error_bytes(workload)
        alone = Moment((), 1, longest.prompt_tokens, stored=stored)
        moment = self._answer(kept, (run, error), alone)
        return moment, sized.resident_bytes + kept

    def _prefill_bytes_of(self, rows: int, tokens: int, step: int) -> tuple[int, int]:
        """What a chunk takes with its caches, and the error of that."""
        found = self._chunk_bytes(rows, tokens, step)
        # A single prompt has the caches of a batch too, which mask padding.
        if rows == 1:
            nbytes, error = self._chunk_bytes(2, tokens, step)
            found = max(found, (ceil_div(nbytes, 2), ceil_div(error, 2)))
        return found

    def _chunk_bytes(self, rows: int, tokens: int, step: int) -> tuple[int, int]:
        workload = replace(prefilled_alone(self._workload, rows, tokens), prefill_step=step)
        moment = self._sized.figures_for(workload).moment
        most = moment.nbytes if moment.prefill_bytes is None else moment.prefill_bytes
        return most - self._sized.resident_bytes, self._sized.error_bytes(workload)


def need_of(moment: ServerMoment) -> Need:
    """Return what a moment needs, with its error."""
    return Need(moment.peak_bytes, 0, error_bytes=moment.prefill_error_bytes)


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
