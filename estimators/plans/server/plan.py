"""The memory of mlx_lm.server for its flags, and the flags that fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.arrivals import AtTimes, ClosedLoop, ServedRequest
from memfit.estimators.plans.server.mixes import usual_mixes
from memfit.estimators.plans.server.simulation import Simulated, simulated
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.result import both_units
from memfit.estimators.results.server import ServerMix, ServerMoment, ServerPlan
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.mlx_lm_commands import launched, server_command
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.advise import converting
from memfit.estimators.sizing.estimate import (
    ALONE,
    assumption_notes,
    device_summary,
    notes_on_versions,
)
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.search import first_fitting
from memfit.estimators.sizing.server_bound import ServerBound, held_limits, need_of, one_at_a_time
from memfit.estimators.sizing.serving import fitting_flags
from memfit.estimators.sizing.sized_model import SizedModel

MAX_SIMULATED = 2000

_NOT_STATED = Note(
    "info",
    "server-clients",
    "as many requests are open as decode together; --clients N for another number",
)


def plan_server(
    sized: SizedModel,
    workload: Workload,
    settings: ServerSettings,
    *,
    clients: int | None = None,
    traffic: Sequence[ServedRequest] = (),
    times: Sequence[tuple[float, float]] = (),
) -> ServerPlan:
    """Return what the server takes at most, and with usual mixes, with ``clients`` requests open.

    Where neither their number nor times are given, as many are open as decode together: more would
    only wait. The flags that fit are then for as many clients as fit with a prompt cache. Every
    request is at most as long as ``workload`` or, where there is traffic, as its longest
    prompt and its longest reply; the traffic then takes the place of the mixes. ``times`` are when
    each of its requests arrived and when its reply ended, in seconds.

    Raises:
        InputError: when a request of the traffic is longer than the model's context.
        UnsupportedError: when mlx-lm cannot run the workload.
    """
    recorded = tuple(traffic[:MAX_SIMULATED])
    requests = recorded or (ServedRequest(workload.prompt_tokens, max(1, workload.max_tokens)),)
    check_lengths(sized, requests)
    stated = clients or bool(times)
    clients = max(clients or (1 if times else settings.rows), _open_together(times))
    prompt = max(each.prompt_tokens for each in requests)
    reply = max(each.max_tokens for each in requests)
    longest = replace(workload, prompt_tokens=prompt, max_tokens=reply)
    bound = ServerBound(sized, longest, clients)
    mixes = _Mixes(prompt, reply, recorded, times[:MAX_SIMULATED])
    usual = mixes.with_flags(bound, settings)
    largest = bound.moment(settings)
    verdict = _verdict(largest, usual, sized)
    bounds = (
        [bound]
        if stated
        else [ServerBound(sized, longest, each, bound.memory) for each in range(clients, 0, -1)]
    )
    with_fewer = bound

    def fitting(device: Device) -> ServerSettings | None:
        nonlocal with_fewer
        with_fewer = _for_most_clients(bounds, settings, device)
        return fitting_flags(with_fewer, settings, device)

    better, chosen = settings_to_run(sized, verdict, settings, fitting)
    with_better = mixes.with_flags(with_fewer, better) if better else ()
    sequential = one_at_a_time(sized, workload)
    most = max(usual, key=lambda mix: mix[0].needed_bytes, default=None)
    held = bound.held_bytes(settings)
    limits = (*held_limits(bound, settings), *run_limits(sized, longest, serving=True))
    return ServerPlan(
        model=sized.checkpoint.id,
        runtime=runtime_summary(sized.runtime_model.runtime),
        device=device_summary(sized.device) if sized.device else None,
        settings=settings,
        kv_bits=workload.kv_bits,
        requests=most[0].requests if most else len(requests),
        clients=clients,
        longest_prompt_tokens=prompt,
        longest_generation_tokens=reply,
        sequential=sequential,
        bound=largest,
        held_bytes=UNSET if held is None else held,
        usual=most[1].largest if most else None,
        mixes=tuple(mix for mix, _ in usual),
        idle_bytes=max(
            (run.idle_bytes for _, run in usual),
            default=largest.weights_bytes + largest.cache_bytes,
        ),
        verdict=tightened(verdict, limits),
        limits=limits,
        waited=max((mix.waited for mix, _ in usual), default=0),
        fitting=better,
        fitting_clients=with_fewer.clients if better else None,
        fitting_bound=with_fewer.moment(better) if better else None,
        fitting_mixes=tuple(mix for mix, _ in with_better),
        commands=tuple(_commands(sized, workload, chosen)) if chosen else (),
        notes=(
            *both_units(tuple(_notes(sized, settings, sequential))),
            *_notes_on_traffic(len(traffic), has_times=bool(times)),
            *(() if stated else (_NOT_STATED,)),
            *notes_on_versions(sized, longest, of=ALONE),
        ),
    )


def settings_to_run(
    sized: SizedModel,
    verdict: Verdict,
    settings: ServerSettings,
    search: Callable[[Device], ServerSettings | None],
) -> tuple[ServerSettings | None, ServerSettings | None]:
    """Return the flags that fit where ``settings`` do not, and those to print a command with."""
    better = search(sized.device) if sized.device and verdict in ("exceeds", "tight") else None
    return better, better or (settings if verdict in ("fits", "unknown") else None)


class _Mixes:
    """The mixes of one question, for any clients and flags."""

    def __init__(
        self,
        prompt: int,
        reply: int,
        recorded: Sequence[ServedRequest],
        times: Sequence[tuple[float, float]],
    ) -> None:
        self._lengths = prompt, reply
        self._recorded, self._times = recorded, times

    def with_flags(
        self, bound: ServerBound, settings: ServerSettings
    ) -> tuple[tuple[ServerMix, Simulated], ...]:
        """Return what each mix takes, nothing where requests run one at a time."""
        if bound.is_sequential:
            return ()
        memory, clients = bound.memory, bound.clients
        if not self._recorded:
            return usual_mixes(memory, *self._lengths, settings, clients)
        arrivals = AtTimes(self._recorded, self._times) if self._times else ClosedLoop(clients)
        run = simulated(memory, self._recorded, settings, arrivals)
        mix = ServerMix(
            name="recorded requests",
            requests=len(self._recorded),
            needed_bytes=run.largest.needed_bytes,
            waited=run.waited,
        )
        return ((mix, run),)


def _for_most_clients(
    bounds: Sequence[ServerBound], settings: ServerSettings, device: Device
) -> ServerBound:
    """Return the bound of the most clients who all have a place and a prompt cache, or the last."""

    def serves(bound: ServerBound) -> bool:
        flags = fitting_flags(bound, settings, device)
        return flags is not None and flags.prompt_cache_size > 0 and flags.rows >= bound.clients

    return first_fitting(bounds, serves, monotone=True) or bounds[-1]


def _verdict(
    bound: ServerMoment, usual: Sequence[tuple[ServerMix, Simulated]], sized: SizedModel
) -> Verdict:
    """Judge the bound; what only it makes too large is tight."""
    verdict, _ = judge(need_of(bound), sized.device)
    needs = [judge(need_of(run.largest), sized.device)[0] for _, run in usual]
    return "tight" if verdict == "exceeds" and needs and "exceeds" not in needs else verdict


def _open_together(times: Sequence[tuple[float, float]]) -> int:
    """Return the most requests that were open at a time."""
    events = sorted(
        (time, change) for each in times for time, change in zip(each, (1, -1), strict=True)
    )
    return max(accumulate(change for _, change in events), default=0)


def _commands(sized: SizedModel, workload: Workload, settings: ServerSettings) -> Iterator[str]:
    rank = sized.runtime_model.subject.rank
    if rank and rank.split:
        return  # the server splits the layers evenly
    yield from converting(
        sized, lambda model: [launched(server_command(model, workload, settings), rank)]
    )


def check_lengths(sized: SizedModel, requests: Iterable[ServedRequest], name: str = "") -> None:
    """Check that no request is longer than the model's context; ``name`` is of the only one.

    Raises:
        InputError: when one is.
    """
    most = sized.model.max_context
    for number, each in enumerate(islice(requests, MAX_SIMULATED), 1):
        if most is not None and each.prompt_tokens + each.max_tokens > most:
            raise InputError(
                f"{name or f'request {number}'}: {each.prompt_tokens} + {each.max_tokens} tokens"
                f" are more than the model's context of {most}; shorten it"
            )


def _notes(sized: SizedModel, settings: ServerSettings, sequential: str | None) -> Iterator[Note]:
    yield from assumption_notes(sized)
    if sequential:
        yield Note("info", "server-sequential", f"{sequential}: requests run one at a time")
    elif settings.prompt_cache_size:
        yield Note(
            "warning",
            "server-prompt-cache",
            "an entry of the prompt cache is a slice that mlx_lm.server has not computed yet: it"
            " keeps the buffers of its whole batch in memory, more than the server's log counts",
        )
    if settings.prompt_cache_bytes is not None:
        size = open_size(settings.prompt_cache_bytes)
        yield Note(
            "warning",
            "server-prompt-cache-bytes",
            f"--prompt-cache-bytes {size} is not counted on: the server applies it only when a"
            " request joins a running batch, and to sizes that leave out what entries keep",
        )


def _notes_on_traffic(count: int, *, has_times: bool) -> Iterator[Note]:
    if count > MAX_SIMULATED:
        text = f"the first {MAX_SIMULATED} of {count} requests are simulated"
        yield Note("info", "server-traffic", text)
    if count and not has_times:
        yield Note(
            "warning",
            "server-traffic-times",
            "the file has no times: each request arrives as soon as a client is free. Timing alone"
            " moves the peak by a third; columns arrival_seconds and duration_seconds replay it",
        )
