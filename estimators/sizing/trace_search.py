"""The longest prompt by trace: searched by the formulas, confirmed by a few traces."""

from dataclasses import dataclass, field, replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.sizing.search import CONTEXT_STEP, longest_context
from memfit.estimators.sizing.sized_model import SizedModel

# A trace of a long prompt takes 0.2 s (Qwen3-4B) to 1.1 s (DeepSeek-V3); one mostly settles it.
MAX_TRACES = 6
_BISECTED_FROM = 3  # scaling has failed twice by then: a limit other than the peak's is in the way
_NEAR = 16  # a sixteenth more context is not worth another trace


@dataclass(slots=True)
class TracedContext:
    """Prompts of any length under a workload, as the trace confirms them.

    The formula's workspace is scaled to the trace's wherever one was made. ``too_long`` is the
    shortest prompt that was found not to fit, by trace or by the scaled formula.
    """

    traced: SizedModel
    formula: SizedModel
    device: Device
    workload: Workload
    too_long: int | None = None
    is_certain: bool = False  # by the formula's largest, without a trace
    _scale: tuple[int, int] = (1, 1)
    _traced: set[Workload] = field(default_factory=set)

    def longest(self, most: int) -> int | None:
        """Return the longest multiple of 256 up to ``most`` that fits, None when none does."""
        top = most // CONTEXT_STEP * CONTEXT_STEP
        found = 0
        self.is_certain = bool(top) and self._goes_without_saying(top)
        if self.is_certain:
            return top
        for tries in range(1, MAX_TRACES + 1):
            tokens = self._candidate(found, top, tries)
            if tokens <= found or not self._leaves_room(self.prompt(tokens)):
                break
            if found and tokens < top and tokens <= found + found // _NEAR:
                break
            if self._confirm(tokens):
                found = tokens
            else:
                self.too_long = tokens
        if self.too_long is None and found < top:
            self.too_long = self._scaled_longest(top) + CONTEXT_STEP
        return found or None

    def prompt(self, tokens: int) -> Workload:
        """Return the workload of a prompt so long and nothing generated."""
        return replace(self.workload, prompt_tokens=tokens, max_tokens=0)

    def is_traced(self, workload: Workload) -> bool:
        """Tell whether `need` of a workload is the trace's."""
        return workload in self._traced and self.traced.workspace_basis(workload)[0] == "traced"

    def requirement(self, workload: Workload) -> Need:
        """Return the need by trace where it was confirmed, else by the formula, scaled.

        Where no trace was made because all lengths fit, it is the formula's largest.
        """
        if workload in self._traced:
            return self.traced.requirement(workload)
        return self._bounded(workload) if self.is_certain else self._by_formula(workload)

    def _candidate(self, found: int, top: int, tries: int) -> int:
        most = top if self.too_long is None else self.too_long - CONTEXT_STEP
        tokens = self._scaled_longest(most)
        if tries == 1:
            tokens = max(tokens, self._asked(most))
        if tries >= _BISECTED_FROM and self.too_long is not None:
            middle = (found + self.too_long) // 2 // CONTEXT_STEP * CONTEXT_STEP
            tokens = min(tokens, middle)
        return tokens if tokens or found else min(CONTEXT_STEP, most)

    def _asked(self, most: int) -> int:
        """The prompt that was asked for, where it fits by trace."""
        fits = judge(self.traced.requirement(self.workload), self.device)[0] == "fits"
        tokens = self.workload.prompt_tokens // CONTEXT_STEP * CONTEXT_STEP
        return min(tokens, most) if fits else 0

    def _scaled_longest(self, most: int) -> int:
        return longest_context(self._found_to_fit, most) or 0

    def _found_to_fit(self, tokens: int) -> bool:
        try:
            return judge(self._by_formula(self.prompt(tokens)), self.device)[0] == "fits"
        except UnsupportedError:
            return False

    def _confirm(self, tokens: int) -> bool:
        workload = self.prompt(tokens)
        try:
            need = self.traced.requirement(workload)
        except UnsupportedError:
            return False
        self._traced.add(workload)
        derived, workspace = self.formula.requirement(workload), self._workspace(workload)
        if workspace:
            beyond = need.peak_bytes - derived.peak_bytes
            self._scale = (max(0, workspace + beyond), workspace)
        return judge(need, self.device)[0] == "fits"

    def _leaves_room(self, workload: Workload) -> bool:
        """Whether weights and caches fit: a trace takes long and finds no less."""
        try:
            need, workspace = self.formula.requirement(workload), self._workspace(workload)
        except UnsupportedError:
            return False
        return judge(Need(need.peak_bytes - workspace, 0), self.device)[0] == "fits"

    def _goes_without_saying(self, tokens: int) -> bool:
        """Whether a prompt fits by the formula's largest, where trace and formula agree."""
        _, percent = self.formula.workspace_basis(self.workload)
        traced = self.traced.figures_for(self.workload).moment.workspace_bytes
        derived = self._workspace(self.workload)
        if abs(traced - derived) * 100 > derived * percent:
            return False
        try:
            return judge(self._bounded(self.prompt(tokens)), self.device)[0] == "fits"
        except UnsupportedError:
            return False

    def _bounded(self, workload: Workload) -> Need:
        need = self.formula.requirement(workload)
        _, percent = self.formula.workspace_basis(workload)
        more = ceil_div(self._workspace(workload) * percent, 100)
        return replace(need, peak_bytes=need.peak_bytes + more)

    def _by_formula(self, workload: Workload) -> Need:
        need, workspace = self.formula.requirement(workload), self._workspace(workload)
        traced, derived = self._scale
        return replace(need, peak_bytes=need.peak_bytes + workspace * traced // derived - workspace)

    def _workspace(self, workload: Workload) -> int:
        return self.formula.figures_for(workload).moment.workspace_bytes
