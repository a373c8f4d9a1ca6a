"""Everything that follows from an estimate: the grid, what to do, and each setting."""

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import (
    Action,
    Advice,
    Grid,
    PartialExperts,
    Recommendation,
    Recommended,
)
from memfit.estimators.runtimes.facets import NvidiaOnly
from memfit.estimators.runtimes.source import Interpolated, Traced
from memfit.estimators.sizing.actions import actions, best_action, find_answer
from memfit.estimators.sizing.grid import (
    NO_GRID,
    NO_MACS,
    mac_grid,
    prompt_grid,
    with_server,
    with_traces,
)
from memfit.estimators.sizing.joint import JointSearch
from memfit.estimators.sizing.macs import macs
from memfit.estimators.sizing.opening import weight_bits_of
from memfit.estimators.sizing.recommend import (
    NOT_RECOMMENDED,
    memory_advice,
    recommend,
    recommended,
)
from memfit.estimators.sizing.sized_model import SizedModel


class Advised(Struct, frozen=True):
    """What follows from an estimate."""

    recommendation: Recommendation
    actions: tuple[Action, ...]
    best_action: int | None
    recommended: Recommended
    partial_experts: PartialExperts | None
    grid: Grid


def advise(sized: SizedModel, workload: Workload, units: Units) -> Advised:
    """Return what follows from a workload on a model.

    By trace, which takes long, settings are searched for the request alone; grid, other weights
    and other machines are by formula.
    """
    search = search_of(sized, workload)
    looked_at = search.by_formula()
    ladder = _Ladder(looked_at)
    answer = find_answer(search, ladder.get)
    advice = recommend(search, units, answer, memory=memory_advice(search, answer, units))
    # By formula in addition to traces, rows of other weights are shown where they are an answer.
    if search.formula and answer.settings and not answer.settings[-1].weight_bits:
        looked_at = replace(looked_at, weight_bits=())
    grid = _grid(looked_at, ladder)
    if isinstance(looked_at.sized.runtime_model.source, Interpolated) and sized.device:
        grid = with_traces(grid, search, advice.context_tokens.value or 0)
    found = actions(search, answer)
    best = best_action(found)
    chosen = None if best is None else found[best]
    if is_here := chosen is not None and "memory_bytes" not in chosen.settings:
        grid = with_server(grid, looked_at, chosen)
    partial = None if is_here else _partial_experts(looked_at)
    return Advised(advice, found, best, recommended(search, chosen, partial), partial, grid)


def _partial_experts(search: JointSearch) -> PartialExperts | None:
    if not search.sized.model.experts():
        return None
    # What is published about them, which no other model needs.
    from memfit.estimators.sizing.partial_experts import partial_experts

    return partial_experts(search)


def search_of(sized: SizedModel, workload: Workload) -> JointSearch:
    """Return the search for settings of a workload."""
    formula = sized.formula_view() if isinstance(sized.runtime_model.source, Traced) else None
    return JointSearch(sized, workload, weight_bits_of(sized), formula)


class _Ladder(Struct):
    """The search on larger Macs, made when it is needed."""

    search: JointSearch
    _made: list[JointSearch] | None = None

    def get(self) -> list[JointSearch]:
        if self._made is None:
            self._made = macs(self.search)
        return self._made


def _grid(search: JointSearch, ladder: _Ladder) -> Grid:
    if search.sized.device:
        return prompt_grid(search)
    is_off_macs = search.sized.runtime_model.facet(NvidiaOnly)
    return NO_MACS if is_off_macs else mac_grid(search, ladder.get())


_NO = Advice("not_applicable", None, "not searched")
NO_ADVICE = Advised(
    Recommendation(
        context_tokens=_NO,
        prefill_step=_NO,
        kv_bits=_NO,
        weight_bits=_NO,
        memory_bytes=_NO,
        wired_limit_bytes=_NO,
        wired_limit_mb=_NO,
    ),
    (),
    None,
    NOT_RECOMMENDED,
    None,
    NO_GRID,
)
"""Where nothing is searched."""
