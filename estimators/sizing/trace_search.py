"""Settings searched by trace: the formulas search, and a few traces confirm."""

from collections.abc import Callable

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Workload
from memfit.estimators.mlx.call_plan import CHUNKS, PREFILL, planned_calls
from memfit.estimators.runtimes.facets import least_bytes
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.search import CONTEXT_STEP, is_accepted, longest_context
from memfit.estimators.sizing.sized_model import (
    SizedModel,
    draft_bytes_of,
    error_bytes_of,
    for_phases,
    is_known,
)

# A trace of a long prompt takes 0.2 s (Qwen3-4B) to 1.1 s (DeepSeek-V3); one is mostly enough.
MAX_TRACES = 6
_HALVED_FROM = 3  # scaling has failed twice by then: something other than the peak is the limit
_NEAR = 12  # a prompt that is traced is at most a twelfth shorter than what the formula allows
_ENOUGH = 8  # an eighth more context is not worth another trace


class TraceSearch(Struct):
    """The search for settings of a workload, confirmed by trace.

    The workspace of the formulas is scaled to that of the last trace: of one chunk for the prompts
    that are no longer, else of several.
    """

    sized: SizedModel
    """The model sized by trace."""
    formula: SizedModel
    """The same model on the same device, sized by formula."""
    workload: Workload
    """The workload that settings are searched for."""
    too_long: int | None = None
    """The shortest prompt that does not fit, by trace or by the scaled formula."""
    is_certain: bool = False
    """Whether even the formula's largest need fits for the longest prompt: nothing is traced."""
    _scales: dict[bool, tuple[int, int]] = field(default_factory=dict)
    """Bytes of workspace by trace, and by formula; of prompts of one chunk and of longer ones."""
    _percent: int | None = None
    """By how much a workspace by trace may be wrong, None before the first."""
    _traced: dict[Workload, SizedModel] = field(default_factory=dict)
    """Workloads that were traced, and the model that has their figures."""
    _chunks: dict[int, int] = field(default_factory=dict)
    """By tokens of the prompt at its end, the need of a whole chunk that was traced."""

    def longest_context(self, most: int) -> int | None:
        """Return the longest multiple of 256 up to ``most`` that fits, None when none does."""
        top = round_down(most, CONTEXT_STEP)
        self.is_certain = bool(top) and is_accepted(self._fits_by_far, top)
        if self.is_certain:
            return top
        found = self._asked(top)
        for attempt in range(1, MAX_TRACES + 1):
            upper = self._candidate(found, top, attempt)
            tokens = upper if upper == top else self._below(upper)
            is_enough = found and tokens < top and found + found // _ENOUGH >= upper
            if tokens <= found or is_enough:
                break
            prompt = self.workload.prompt_only(tokens)
            if not is_accepted(self._leaves_room, prompt):
                break
            if is_accepted(self._confirm, prompt):
                found = tokens
            else:
                self.too_long = tokens
        if self.too_long is None and found < top:
            self.too_long = self._longest_by_formula(top) + CONTEXT_STEP
        return found or None

    @property
    def _is_interpolated(self) -> bool:
        return isinstance(self.formula.runtime_model.source, Interpolated)

    def caveat(self, workload: Workload) -> str:
        """Return how `requirement` of a workload was found, empty when by trace."""
        traced = self._traced.get(workload)
        if traced and traced.runtime_model.basis("workspace", workload)[0] == "traced":
            return ""
        if self._is_interpolated:
            return self.by
        _, percent = self.formula.runtime_model.basis("workspace", self.workload)
        return f"{self.by}, with its workspace raised by its error of {percent} %"

    def requirement(self, workload: Workload) -> Need:
        """Return the need by trace where it was confirmed, else by the scaled formula.

        Where no trace was made because all lengths fit, it is the formula's largest.

        Raises:
            UnsupportedError: when the runtime cannot run the workload.
        """
        if workload in self._traced:
            return self._traced[workload].requirement(workload)
        return self._largest_need(workload) if self.is_certain else self._scaled_need(workload)

    def _candidate(self, found: int, top: int, attempt: int) -> int:
        """The prompt to trace next, at most ``found`` when there is none."""
        most = top if self.too_long is None else self.too_long - CONTEXT_STEP
        if self._is_interpolated:
            # The line between traced prompts needs this trace too.
            if attempt == 1 and is_accepted(self._leaves_room, self.workload.prompt_only(most)):
                return most
            attempt -= 1
        tokens = self._longest_by_formula(most)
        if attempt <= 1 and is_accepted(self._fits, self.workload):
            tokens = max(tokens, min(round_down(self.workload.prompt_tokens, CONTEXT_STEP), most))
        if attempt >= _HALVED_FROM and self.too_long is not None:
            tokens = min(tokens, round_down((found + self.too_long) // 2, CONTEXT_STEP))
        return tokens if tokens or found else min(CONTEXT_STEP, most)

    def _below(self, upper: int) -> int:
        """A prompt near ``upper`` that is likelier to fit, and quicker to trace."""
        lower = round_down(upper - upper // (2 * _NEAR), CONTEXT_STEP)
        # With a last chunk that is too short for the peak.
        whole_chunks = round_down(lower - CONTEXT_STEP, self.workload.prefill_step)
        short = whole_chunks + CONTEXT_STEP
        if self._is_near(short, upper) and self._ends_low(short):
            return short
        return lower if self._is_near(lower, upper) else upper

    def _is_near(self, tokens: int, upper: int) -> bool:
        return tokens + tokens // _NEAR >= upper

    def _ends_low(self, tokens: int) -> bool:
        """Whether the last chunk of a prompt is not its peak."""
        prompt = self.workload.prompt_only(tokens)
        return not self._is_interpolated and ("last_chunk" in lower_calls(self.formula, prompt))

    def _asked(self, top: int) -> int:
        """Scale the formula to what is asked for; return its prompt if that is found to fit."""
        asked, tokens = self.workload, self.workload.prompt_tokens
        if self._is_interpolated and not is_known(self.sized, asked):
            return 0
        fits = is_accepted(self._confirm, asked)
        if asked != asked.prompt_only(tokens) or tokens % CONTEXT_STEP or tokens > top:
            return 0
        if not fits:
            self.too_long = tokens
        return tokens if fits else 0

    def _longest_by_formula(self, most: int) -> int:
        scaled = self._scaled_need
        return longest_context(self.formula, self.workload, most, requirement=scaled) or 0

    def _fits(self, workload: Workload) -> bool:
        return self._judged(self.requirement(workload))

    def _confirm(self, workload: Workload) -> bool:
        """Whether a workload fits by trace; the formula is scaled to it."""
        traced = self._traced[workload] = peak_view(self.sized, self.formula, workload)
        need = traced.requirement(workload)
        if self._workspace(workload):
            _, self._percent = traced.runtime_model.basis("workspace", workload)
        if not self.sized.draft:
            self._keep_chunks(traced, workload, need)
        self._keep_scale(workload, need.peak_bytes)
        return self._judged(need)

    def _keep_scale(self, workload: Workload, peak_bytes: int) -> None:
        """Keep the scale of the formula for workloads like one that was traced."""
        if workspace := self._workspace(workload):
            beyond = peak_bytes - self.formula.requirement(workload).peak_bytes
            self._scales[_is_one_chunk(workload)] = (max(0, workspace + beyond), workspace)

    def _keep_chunks(self, traced: SizedModel, workload: Workload, need: Need) -> None:
        """Keep what every prompt needs that is longer than a chunk of this one."""
        moment = traced.figures_for(workload).moment
        others = need.peak_bytes - moment.nbytes
        for call in planned_calls(workload, traced.runtime_model.runtime.versions):
            nbytes = moment.call_bytes.get(call.phase)
            if nbytes and call.phase in CHUNKS and call.tokens == workload.prefill_step:
                end = call.position + call.tokens
                self._chunks[end] = nbytes + others
                if not call.position:
                    self._keep_scale(workload.prompt_only(end + 1), nbytes + others)

    def _leaves_room(self, workload: Workload) -> bool:
        """Whether a workload may fit, with the formula's error: a trace takes long."""
        if self._is_interpolated:
            least = least_bytes(self.sized.runtime_model, workload)
            return self._judged(
                Need(least + draft_bytes_of(self.sized, workload) + self.formula.margin_bytes, 0)
            )
        need = self._scaled_need(workload)
        _, percent = self.formula.runtime_model.basis("workspace", workload)
        less = self._workspace(workload) * percent // 100
        return self._judged(replace(need, peak_bytes=need.peak_bytes - less, error_bytes=0))

    def _fits_by_far(self, tokens: int) -> bool:
        """Whether a prompt fits by the formula's largest, where trace and formula agree."""
        if self._is_interpolated:
            return False
        _, percent = self.formula.runtime_model.basis("workspace", self.workload)
        view = peak_view(self.sized, self.formula, self.workload)
        moment, derived = view.figures_for(self.workload).moment, self._workspace(self.workload)
        apart = max(abs(moment.workspace_bytes - derived), moment.batch_bytes)
        if apart * 100 > derived * percent:
            return False
        return self._judged(self._largest_need(self.workload.prompt_only(tokens)))

    @property
    def by(self) -> str:
        """What gives a requirement where no trace was made, in words."""
        return "between traced prompts" if self._is_interpolated else "by formula"

    def _largest_need(self, workload: Workload) -> Need:
        need = self.formula.requirement(workload)
        _, percent = self.formula.runtime_model.basis("workspace", workload)
        more = ceil_div(self._workspace(workload) * percent, 100)
        return replace(need, peak_bytes=need.peak_bytes + more, error_bytes=0)

    def _scaled_need(self, workload: Workload) -> Need:
        need, workspace = self.formula.requirement(workload), self._workspace(workload)
        if self._percent is None:
            return need
        own = _is_one_chunk(workload)
        traced, derived = self._scales[own if own in self._scales else not own]
        scaled = workspace * traced // derived
        error_bytes = ceil_div(scaled * self._percent, 100)
        chunks = (least for end, least in self._chunks.items() if end < workload.prompt_tokens)
        peak_bytes = max(need.peak_bytes + scaled - workspace, max(chunks, default=0))
        return replace(need, peak_bytes=peak_bytes, error_bytes=error_bytes)

    def _workspace(self, workload: Workload) -> int:
        return self.formula.figures_for(workload).moment.workspace_bytes

    def _judged(self, need: Need) -> bool:
        return judge(need, self.sized.device)[0] == "fits"


def _is_one_chunk(workload: Workload) -> bool:
    """Whether a prompt is one chunk, but for its last token."""
    return workload.prompt_tokens <= workload.prefill_step + 1


def peak_view(sized: SizedModel, formula: SizedModel, workload: Workload) -> SizedModel:
    """Return what has the peak of a workload by trace, of as few calls as the formula allows.

    A call is left out if, with the formula's error, it takes less than another.
    """
    if is_known(sized, workload) or sized.draft:
        return sized
    if formula.runtime_model.basis("workspace", workload)[0] != "derived":
        return sized
    low = lower_calls(formula, workload)
    return _of_higher_chunks(sized, formula, workload, low) or for_phases(sized, ALL_PHASES - low)


def _of_higher_chunks(
    sized: SizedModel, formula: SizedModel, workload: Workload, low: frozenset[CallPhase]
) -> SizedModel | None:
    """What has the peak without a chunk that takes less than the others by trace, if one does."""
    # The first is mostly kept from another run.
    chunks = _below(formula, workload, errors=1) & CHUNKS - {"first_chunk"} - low
    if not chunks:
        return None
    view = for_phases(sized, ALL_PHASES - low - chunks)
    try:
        traced = view.figures_for(workload).moment.nbytes
    except UnsupportedError:
        return None
    call_bytes = formula.figures_for(workload).moment.call_bytes
    most = max(call_bytes[call] for call in chunks) + error_bytes_of(formula, workload)
    is_traced = view.runtime_model.basis("workspace", workload)[0] == "traced"
    return view if is_traced and most < traced else None


def lower_calls(formula: SizedModel, workload: Workload) -> frozenset[CallPhase]:
    """Return the calls below the peak by more than the formula may be wrong for two of them."""
    return _below(formula, workload, errors=2)


def _below(formula: SizedModel, workload: Workload, *, errors: int) -> frozenset[CallPhase]:
    moment = formula.figures_for(workload).moment
    limit = moment.nbytes - errors * error_bytes_of(formula, workload)
    lower = frozenset[CallPhase]()
    if moment.decode_bytes is not None and moment.decode_bytes < limit:
        lower |= ALL_PHASES - PREFILL
    # Of prompts whose cache is quantised on the way the formula follows other chunks.
    if workload.kv_bits is None or not workload.quantized_kv_start:
        lower |= {call for call, nbytes in moment.call_bytes.items() if nbytes < limit}
    return lower


def call_over(
    formula: SizedModel, workload: Workload, is_over: Callable[[int], bool]
) -> CallPhase | None:
    """Return a call of the prompt whose need alone ``is_over``, the quickest to trace."""
    calls = formula.figures_for(workload).moment.call_bytes
    over = [
        call
        for call, nbytes in calls.items()
        if call in PREFILL and is_over(nbytes + formula.margin_bytes)
    ]
    # Where it can hold the peak, it is needed for the others too.
    if "first_chunk" in over and "first_chunk" not in lower_calls(formula, workload):
        return "first_chunk"
    return over[-1] if over else None
