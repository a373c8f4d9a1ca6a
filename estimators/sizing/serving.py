"""The flags with which mlx_lm.server runs a request, judged as its command is printed."""

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import Cell, ServerRun
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.mlx_lm_commands import SERVER_KEEPS, together
from memfit.estimators.runtimes.run_limits import run_limits, server_generates, tightened
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.joint import JointSearch, Settings
from memfit.estimators.sizing.search import (
    CONTEXT_STEP,
    first_fitting,
    longest_context,
    longest_prompt,
)
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.server_memory import need_of
from memfit.estimators.sizing.sized_model import SizedModel

REPLY_TOKENS = 512
"""Tokens that mlx_lm.server generates where a request does not say (server.py, --max-tokens)."""


KEPT = (2, 1, 0)
"""Prompt caches to keep where memory is short: one user's last reply and its prompt, one of them,
none. Without any, every turn of a conversation computes its whole prompt again, which costs more
than a smaller prefill step does."""


class Served(Struct, frozen=True):
    """A server's flags, and the most that it takes with them in any order of requests."""

    settings: ServerSettings
    need: Need


class Serving(Struct, eq=False):
    """The search for a server's flags on the machine of a joint search."""

    search: JointSearch
    _bounds: dict[tuple[int | None, Workload], ServerBound] = field(default_factory=dict)

    def best(self, settings: Settings, prompt_tokens: int | None = None) -> Served | None:
        """Return the flags that fit and cost the least speed, None where none fits."""
        for kept in KEPT:
            for step in self.search.steps():
                chosen = replace(settings, prefill_step=step)
                if step > settings.prefill_step or not self._may_fit(chosen, kept, prompt_tokens):
                    continue
                found = self._served(chosen, kept, prompt_tokens)
                if found is None or self._fits(found.need):
                    return found
        return None

    def _may_fit(self, settings: Settings, kept: int, prompt_tokens: int | None) -> bool:
        """Whether one run fits beside so many caches of its prompt: no server takes less."""
        view = self._view(settings)
        workload = self.search.workload_with(settings, prompt_tokens)
        try:
            need, figures = view.requirement(workload), view.figures_for(workload)
        except (InputError, UnsupportedError):
            return False
        entry = (figures.kv.held_bytes + figures.ssm_bytes) // workload.batch
        return self._fits(replace(need, peak_bytes=need.peak_bytes + kept * entry, error_bytes=0))

    def run(self, settings: Settings, longest_run: int | None) -> ServerRun | None:
        """Return the flags to print, None where none fits, and the longest prompt that they run.

        It is shorter than ``longest_run``, that of one run; None: it is not searched. More caches
        are kept, up to the default of the server, where that costs no context.
        """
        if (served := self.best(settings)) is None:
            return None
        if longest_run is None:
            return ServerRun(settings=served.settings, needed_bytes=served.need.peak_bytes)
        longest = self._longest(settings, served.settings, longest_run)
        chosen = replace(settings, prefill_step=served.settings.prefill_step)

        def fits(kept: int) -> bool:
            found = self._served(chosen, kept, longest)
            return found is not None and self._fits(found.need)

        least = served.settings.prompt_cache_size
        counts = range(SERVER_KEEPS, least - 1, -1) if least else ()
        kept = first_fitting(counts, fits, monotone=True) or least
        found, at_longest = (self._served(chosen, kept, tokens) for tokens in (None, longest))
        assert found
        assert at_longest
        return ServerRun(
            settings=found.settings,
            needed_bytes=found.need.peak_bytes,
            context_tokens=longest,
            context_needed_bytes=at_longest.need.peak_bytes,
        )

    def cell(self, settings: Settings, prompt_tokens: int, one_run: Cell) -> Cell:
        """Return what the server needs for a prompt that one run needs ``one_run`` for."""
        sized = self.search.sized
        if one_run.verdict not in ("fits", "tight"):
            return Cell("exceeds", None, settings.prefill_step, "one run does not fit")
        fastest = replace(settings, prefill_step=one_run.prefill_step)
        if (found := self.best(fastest, prompt_tokens)) is None:
            return Cell("exceeds", None, settings.prefill_step, "no flags of the server fit")
        served = self._workload(settings, prompt_tokens)
        limits = run_limits(sized.runtime_model, served, serving=True)
        return Cell(
            tightened(judge(found.need, sized.device)[0], limits),
            found.need.peak_bytes,
            found.settings.prefill_step,
            prompt_cache_size=found.settings.prompt_cache_size,
        )

    def _longest(self, settings: Settings, flags: ServerSettings, longest_run: int) -> int:
        sized, workload = self._view(settings), self._workload(settings, None)
        chosen = replace(settings, prefill_step=flags.prefill_step)
        # A smaller step may run a longer prompt than that of one run with the larger one.
        reach = (
            longest_run if flags.prefill_step == settings.prefill_step else longest_prompt(sized)
        )
        most = min(reach, longest_prompt(sized) - workload.max_tokens)

        def need(longer: Workload) -> Need:
            return need_of(self._bound(chosen, longer.prompt_tokens).moment(flags))

        asked = workload.prompt_tokens
        known = round_down(asked, CONTEXT_STEP)
        found = longest_context(sized, workload, most, fits_at=known, requirement=need)
        return max(found or 0, asked)

    def _served(self, settings: Settings, kept: int, prompt_tokens: int | None) -> Served | None:
        try:
            bound = self._bound(settings, prompt_tokens)
            flags = together(self._workload(settings, prompt_tokens), kept)
            return Served(flags, need_of(bound.moment(flags)))
        except (InputError, UnsupportedError):
            return None

    def _bound(self, settings: Settings, prompt_tokens: int | None) -> ServerBound:
        workload = self._workload(settings, prompt_tokens)
        key = settings.weight_bits, workload
        if key not in self._bounds:
            self._bounds[key] = ServerBound(self._view(settings), workload, workload.batch)
        return self._bounds[key]

    def _view(self, settings: Settings) -> SizedModel:
        """The model by formula: the bound compares several lengths, each a trace of its own."""
        return self.search.model(settings.weight_bits).formula_view()

    def _workload(self, settings: Settings, prompt_tokens: int | None) -> Workload:
        workload = self.search.workload_with(settings, prompt_tokens)
        return replace(workload, max_tokens=workload.max_tokens or REPLY_TOKENS)

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
    if isinstance(sized.formula_view().runtime_model.source, Interpolated):
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
    if not is_served(search) or search.verdict(search.asked) != "fits":
        return None
    longest = longest_context(sized, workload, longest_prompt(sized))
    return Serving(search).run(search.asked, longest or 0)


def server_flags(sized: SizedModel, workload: Workload) -> ServerSettings | None:
    """Return the flags of the server to print for a workload, None where no server fits."""
    found = served_here(sized, workload)
    return found.settings if found else None
