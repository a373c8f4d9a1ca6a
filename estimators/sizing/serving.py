"""The flags with which mlx_lm.server runs requests, judged as its command is printed."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.advice import Cell, ServerRun
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.mlx_lm_commands import SERVER_KEEPS, together
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.runtimes.source import Interpolated, Recorded
from memfit.estimators.sizing.joint import JointSearch, RequestSettings
from memfit.estimators.sizing.run_limits import run_limits, server_generates, tightened
from memfit.estimators.sizing.search import (
    CONTEXT_STEP,
    PREFILL_STEPS,
    first_fitting,
    halves,
    is_accepted,
    longest_context,
    longest_prompt,
)
from memfit.estimators.sizing.server_bound import ServerBound, held_limits, need_of
from memfit.estimators.sizing.sized_model import SizedModel

REPLY_TOKENS = 512
"""Tokens that mlx_lm.server generates where a request does not say (server.py, --max-tokens)."""

CACHES = (2, 1, 0)
"""Prompt caches to keep where memory is short: one user's last reply and its prompt, one of them,
none. Without any, every turn of a conversation computes its whole prompt again, which costs more
than a smaller prefill step does."""


class Serving(Struct, frozen=True):
    """The search for a server's flags on the machine of a joint search."""

    search: JointSearch

    def best(
        self, settings: RequestSettings, prompt_tokens: int | None = None
    ) -> ServerSettings | None:
        """Return the flags that fit and cost the least speed, None where none fits."""
        steps = [step for step in self.search.steps() if step <= settings.prefill_step]
        with_steps = [replace(settings, prefill_step=step) for step in steps]
        candidates = [self._flags(each, caches) for caches in CACHES for each in with_steps]

        def fits(flags: ServerSettings) -> bool:
            return self._may_fit(settings, flags, prompt_tokens) and self._fits(
                self._need(settings, flags, prompt_tokens)
            )

        return first_fitting(candidates, fits)

    def _may_fit(
        self, settings: RequestSettings, flags: ServerSettings, prompt_tokens: int | None
    ) -> bool:
        """Whether one run fits beside the caches of its prompt: no server takes less."""
        view, chosen = self._view(settings), replace(settings, prefill_step=flags.prefill_step)
        workload = replace(self.search.workload_with(chosen, prompt_tokens), cached_tokens=0)
        need, figures = view.requirement(workload), view.figures_for(workload)
        entry_bytes = (figures.kv.held_bytes + figures.ssm_bytes) // workload.batch
        kept_bytes = flags.prompt_cache_size * entry_bytes
        return self._fits(replace(need, peak_bytes=need.peak_bytes + kept_bytes, error_bytes=0))

    def run(self, settings: RequestSettings, longest_run: int | None) -> ServerRun | None:
        """Return the flags to print, None where none fits, and the longest prompt that they run.

        It is shorter than ``longest_run``, that of one run; None: it is not searched. More caches
        are kept, up to the default of the server, where that costs no context.
        """
        if (flags := self.best(settings)) is None:
            return None
        if longest_run is None:
            needed_bytes = self._need(settings, flags).peak_bytes
            return ServerRun(settings=flags, needed_bytes=needed_bytes)
        longest = self._longest(settings, flags, longest_run)
        least = flags.prompt_cache_size
        counts = range(SERVER_KEEPS, least - 1, -1) if least else ()
        more = [replace(flags, prompt_cache_size=count) for count in counts]

        # The request may need more than the longest prompt: needs are not monotone.
        def fits(flags: ServerSettings) -> bool:
            return all(self._fits(self._need(settings, flags, each)) for each in (longest, None))

        flags = first_fitting(more, fits, monotone=True) or flags
        return ServerRun(
            settings=flags,
            needed_bytes=self._need(settings, flags).peak_bytes,
            context_tokens=longest,
            context_needed_bytes=self._need(settings, flags, longest).peak_bytes,
        )

    def cell(self, settings: RequestSettings, prompt_tokens: int, one_run: Cell) -> Cell:
        """Return what the server needs for a prompt that one run needs ``one_run`` for."""
        sized = self.search.sized
        if one_run.verdict not in ("fits", "tight"):
            return Cell("exceeds", None, settings.prefill_step, "one run does not fit")
        fastest = replace(settings, prefill_step=one_run.prefill_step)
        if (flags := self.best(fastest, prompt_tokens)) is None:
            return Cell("exceeds", None, settings.prefill_step, "no flags of the server fit")
        need = self._need(settings, flags, prompt_tokens)
        served = self._workload(settings, prompt_tokens)
        bound = self._bound(fastest, prompt_tokens)
        limits = (*held_limits(bound, flags), *run_limits(sized, served, serving=True))
        return Cell(
            tightened(judge(need, sized.device)[0], limits),
            need.peak_bytes,
            flags.prefill_step,
            prompt_cache_size=flags.prompt_cache_size,
        )

    def _longest(self, settings: RequestSettings, flags: ServerSettings, longest_run: int) -> int:
        sized, workload = self._view(settings), self._workload(settings, None)
        # A smaller step may run a longer prompt than that of one run with the larger one.
        reach = (
            longest_run if flags.prefill_step == settings.prefill_step else longest_prompt(sized)
        )
        most = min(reach, longest_prompt(sized) - workload.max_tokens)

        def need(longer: Workload) -> Need:
            return self._need(settings, flags, longer.prompt_tokens)

        known = round_down(workload.prompt_tokens, CONTEXT_STEP)
        longest = longest_context(sized, workload, most, fits_at=known, requirement=need)
        return max(longest or 0, workload.prompt_tokens)

    def _flags(self, settings: RequestSettings, caches: int) -> ServerSettings:
        return together(self.search.workload_with(settings), caches)

    def _need(
        self, settings: RequestSettings, flags: ServerSettings, prompt_tokens: int | None = None
    ) -> Need:
        """The most that the server takes; its prefill step is that of the flags."""
        return need_of(self._bound(settings, prompt_tokens).moment(flags))

    def _bound(self, settings: RequestSettings, prompt_tokens: int | None) -> ServerBound:
        usual = replace(settings, prefill_step=self.search.workload.prefill_step)
        workload = self._workload(usual, prompt_tokens)
        formats, bounds = (settings.weight_bits, workload.kv_bits), self.search.bounds
        same = bounds.setdefault(formats, {})
        if workload not in same:
            # The memory of another length has its chunks already.
            memory = next((bound.memory for bound in same.values()), None)
            same[workload] = ServerBound(self._view(settings), workload, workload.batch, memory)
        return same[workload]

    def _view(self, settings: RequestSettings) -> SizedModel:
        """The model by formula: the bound compares several lengths, each a trace of its own."""
        return self.search.model(settings.weight_bits).formula_view()

    def _workload(self, settings: RequestSettings, prompt_tokens: int | None) -> Workload:
        # The bound is of any part of a prompt in the server's own cache.
        workload = self.search.workload_with(settings, prompt_tokens)
        reply = workload.max_tokens or REPLY_TOKENS
        return replace(workload, max_tokens=reply, cached_tokens=0)

    def _fits(self, need: Need) -> bool:
        return judge(need, self.search.sized.device)[0] == "fits"


def not_served(search: JointSearch) -> str:
    """Return what keeps mlx_lm.server from being judged for the workload; empty: nothing."""
    workload, sized = search.workload, search.sized
    most = server_generates(sized.runtime_model, workload)
    if not sized.runtime_model.facet(MlxLmPrograms) or workload.images:
        return "takes no images" if workload.images else f"is not {sized.runtime}'s"
    if workload.max_kv_size is not None:
        return "rotates no cache"
    if most is not None and workload.max_tokens > most:
        return f"ends after about {most} generated tokens"
    # Several sequences are traced, also where one is recorded.
    if isinstance(sized.formula_view().runtime_model.source, Interpolated | Recorded):
        return "is judged by memfit plan server, with traces of its own"
    if sized.device is None or sized.device.backend == "cuda":
        # Its graphs are followed through all layers: a bound would take a minute.
        return "is judged by memfit plan server"
    return ""


def is_served(search: JointSearch) -> bool:
    """Whether mlx_lm.server is judged for the workload."""
    return not not_served(search)


def served_here(sized: SizedModel, workload: Workload) -> ServerRun | None:
    """Return the server of a workload on the model's device, None where no flags of it fit."""
    search = JointSearch(sized, workload)
    if not is_served(search) or search.verdict(search.requested) != "fits":
        return None
    longest = longest_context(sized, workload, longest_prompt(sized))
    return Serving(search).run(search.requested, longest or 0)


def server_flags(sized: SizedModel, workload: Workload) -> ServerSettings | None:
    """Return the flags of the server to print for a workload, None where no server fits."""
    server = served_here(sized, workload)
    return server.settings if server else None


def fitting_flags(
    bound: ServerBound, settings: ServerSettings, device: Device
) -> ServerSettings | None:
    """Return the flags nearest to ``settings`` whose bound fits the device, None without any.

    Concurrency that the clients cannot use is left out: it costs nothing. Then the levers are the
    size of the prompt cache, which keeps a batch for each entry, the requests that decode, the
    prompts prefilled together, smaller chunks, and no prompt cache at all.
    """

    def fits(flags: ServerSettings) -> bool:
        return judge(need_of(bound.moment(flags)), device)[0] == "fits"

    for flags in _concurrencies(settings, bound.clients):
        size = flags.prompt_cache_size
        if size and is_accepted(fits, replace(flags, prompt_cache_size=1)):
            sizes = [replace(flags, prompt_cache_size=each) for each in range(size, 0, -1)]
            return first_fitting(sizes, fits, monotone=True)
    none = (replace(each, prompt_cache_size=0) for each in _concurrencies(settings, bound.clients))
    return first_fitting(tuple(none), fits)


def _concurrencies(settings: ServerSettings, clients: int) -> Iterator[ServerSettings]:
    decode = min(settings.decode_concurrency, clients)
    prompts = min(settings.prompt_concurrency, clients)
    given = settings.prefill_step
    for step in (given, *(each for each in PREFILL_STEPS if each < given)):
        for prefilled in (prompts, *halves(prompts, 1)):
            for rows in (decode, *halves(decode, 1)):
                # The larger of the two decides how many decode (BatchGenerator).
                if rows >= prefilled:
                    yield replace(
                        settings,
                        prefill_step=step,
                        prompt_concurrency=prefilled,
                        decode_concurrency=rows,
                    )
