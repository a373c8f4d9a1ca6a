"""All settings of a request searched together: the cheapest set that makes it fit.

Prefill steps cost speed, bits of the cache and of the weights quality, a larger Mac money. Sets
are compared in that order: one that changes no weights is cheaper than any that does.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import GIB, Backend, Device, GpuClass
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.results.advice import ConversionMemory
from memfit.estimators.results.terms import Cost, Verdict
from memfit.estimators.runtimes.facets import NvidiaOnly, least_bytes, runs_kv_bits
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.runtimes.source import Interpolated, Recorded
from memfit.estimators.sizing.opening import with_weight_bits
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.search import (
    CONTEXT_STEP,
    KV_BITS,
    PREFILL_STEPS,
    fits_comfortably,
    is_accepted,
    least_excess,
    longest_context,
    longest_prompt,
    with_kv_bits,
)
from memfit.estimators.sizing.sized_model import SizedModel, comparing, for_phases, is_known

if TYPE_CHECKING:
    from memfit.estimators.sizing.server_bound import ServerBound


class RequestSettings(Struct, frozen=True):
    """What may be changed to make a request fit."""

    prefill_step: int
    kv_bits: int | None
    weight_bits: int | None = None
    """None: the weights as they are."""

    def changes(self, requested: "RequestSettings") -> dict[str, int]:
        """Return the settings that differ from those of the request."""
        values = {name: getattr(self, name) for name in ("weight_bits", "kv_bits", "prefill_step")}
        return {name: v for name, v in values.items() if v and v != getattr(requested, name)}

    def cost(self, requested: "RequestSettings") -> Cost:
        """Return what the changes cost, the dearest of them."""
        if self.weight_bits or self.kv_bits != requested.kv_bits:
            return "quality"
        return "none" if self == requested else "speed"


class Longest(Struct, frozen=True):
    """The longest prompt that fits, 0 when none does, and the settings it fits with."""

    tokens: int
    settings: RequestSettings


Gpu = tuple[Backend, GpuClass | None, int | None] | None
"""What MLX's rules depend on; None without a device."""


class JointSearch(Struct, eq=False):
    """The search for settings of one request on one machine.

    Every candidate is judged by the figures of an estimate with its settings.
    """

    sized: SizedModel
    workload: Workload
    weight_bits: tuple[int, ...] = ()
    """Bits that the weights can be converted to, most first; what is converted is by formula."""
    formula: SizedModel | None = None
    """The same model by formula, where the figures are by trace."""
    _variants: dict[int, SizedModel | UnsupportedError] = field(default_factory=dict)
    _views: dict[tuple[int | None, Workload], SizedModel] = field(default_factory=dict)
    """By weight bits and workload, what has the need by trace."""
    bounds: dict[tuple[int | None, int | None], dict[Workload, "ServerBound"]] = field(
        default_factory=dict
    )
    """By bits of weights and cache, the bounds of a server for each workload."""
    _conversions: dict[tuple[int | None, Gpu], ConversionMemory | None] = field(
        default_factory=dict
    )
    """By weight bits and GPU, what converting takes."""

    @property
    def requested(self) -> RequestSettings:
        """The settings of the request."""
        return RequestSettings(self.workload.prefill_step, self.workload.kv_bits)

    def _formula_of(self, settings: RequestSettings) -> SizedModel | None:
        """The model by formula, where figures are by trace and a formula describes it."""
        if settings.weight_bits or (
            self.formula and isinstance(self.formula.runtime_model.source, Interpolated)
        ):
            return None
        return self.formula

    @property
    def searches_prompts(self) -> bool:
        """Whether prompts are searched for several settings; by trace it would take too long."""
        return self.sized.runtime_model.source.method != "trace"

    def steps(self) -> tuple[int, ...]:
        """Return the prefill step of the request, then the smaller ones."""
        usual = self.workload.prefill_step
        if isinstance(
            self.sized.runtime_model.source, Interpolated
        ):  # every other step takes traces of its own
            return (usual,)
        least = self.sized.runtime_model.runtime.least_prefill_step
        return (usual, *(step for step in PREFILL_STEPS if least <= step < usual))

    def kv_bits(self) -> tuple[int | None, ...]:
        """Return the KV bits of the request, then the fewer ones that the runtime may run."""
        usual = self.workload.kv_bits
        runs = runs_kv_bits(self.sized.runtime_model, self.workload)
        # Runs over quantised caches are traced.
        source = self.sized.runtime_model.source
        if isinstance(source, Interpolated | Recorded) or not runs:
            return (usual,)
        return (usual, *(bits for bits in KV_BITS if bits and bits < (usual or 16)))

    def candidates(self) -> Iterator[RequestSettings]:
        """Yield every set of settings, the cheapest first."""
        for weight_bits in (None, *self.weight_bits):
            for kv_bits in self.kv_bits():
                for step in self.steps():
                    yield RequestSettings(step, kv_bits, weight_bits)

    def model(self, weight_bits: int | None) -> SizedModel:
        """Return the model with its weights converted.

        Raises:
            UnsupportedError: when mlx-lm cannot convert it to these bits.
        """
        if weight_bits is None:
            return self.sized
        if weight_bits not in self._variants:
            try:
                self._variants[weight_bits] = with_weight_bits(self.sized, weight_bits)
            except UnsupportedError as error:
                self._variants[weight_bits] = error
        variant = self._variants[weight_bits]
        if isinstance(variant, UnsupportedError):
            raise variant
        return variant

    def workload_with(
        self, settings: RequestSettings, prompt_tokens: int | None = None
    ) -> Workload:
        """Return the request with other settings, and with another prompt."""
        tokens = prompt_tokens or self.workload.prompt_tokens
        changed = replace(self.workload, prompt_tokens=tokens, prefill_step=settings.prefill_step)
        if settings.kv_bits == self.workload.kv_bits:
            return changed
        return with_kv_bits(changed, settings.kv_bits)

    def need(self, settings: RequestSettings, prompt_tokens: int | None = None) -> Need:
        """Return what the request needs with other settings.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        workload = self.workload_with(settings, prompt_tokens)
        return self.sized_for(settings, prompt_tokens).requirement(workload)

    def sized_for(self, settings: RequestSettings, prompt_tokens: int | None = None) -> SizedModel:
        """Return the model that answers for the request with other settings.

        Raises:
            UnsupportedError: when mlx-lm cannot convert it to these bits.
        """
        model, formula = self.model(settings.weight_bits), self._formula_of(settings)
        if formula is None:
            return model
        key = settings.weight_bits, self.workload_with(settings, prompt_tokens)
        if key not in self._views:
            from memfit.estimators.sizing.trace_search import peak_view

            self._views[key] = peak_view(model, formula, key[1])
        return self._views[key]

    def verdict(self, settings: RequestSettings, prompt_tokens: int | None = None) -> Verdict:
        """Return the verdict of the request with other settings.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        need = self.need(settings, prompt_tokens)
        return judge(need, self.sized.device)[0]

    def stated_verdict(
        self, settings: RequestSettings, prompt_tokens: int | None = None
    ) -> Verdict:
        """Return the verdict that is shown: that of the bytes, and of what else ends a run.

        A search goes by the bytes, for no setting changes the rest.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        workload = self.workload_with(settings, prompt_tokens)
        limits = run_limits(self.model(settings.weight_bits), workload)
        return tightened(self.verdict(settings, prompt_tokens), limits)

    def converts(self, settings: RequestSettings) -> bool:
        """Whether the weights can have these bits."""
        return bool(self.model(settings.weight_bits))

    def reach(
        self, settings: RequestSettings, prompt_tokens: int | None = None, *, must_fit: bool = False
    ) -> Verdict:
        """Return the verdict, computed only where quick parts of the need leave it open.

        If it ``must_fit``, what fits tightly or not at all may be answered as either.
        """
        refused: set[Verdict] = {"exceeds", "tight"} if must_fit else {"exceeds"}
        for part in self._parts(settings, prompt_tokens, refused):
            quick, _ = judge(part, self.sized.device)
            if quick in refused:
                return quick
        return self.verdict(settings, prompt_tokens)

    def _parts(
        self, settings: RequestSettings, prompt_tokens: int | None, refused: Container[Verdict]
    ) -> Iterator[Need]:
        """Parts of the need: what is quick to compute, then a trace of a call that may be over."""
        model, formula = self.model(settings.weight_bits), self._formula_of(settings)
        least = self._least(settings, prompt_tokens)
        yield Need(least, 0, budget=model.runtime_model.runtime.budget)
        if formula is None or model.draft or self._is_known(settings, prompt_tokens):
            return
        workload = self.workload_with(settings, prompt_tokens)
        by_formula = replace(formula.requirement(workload), error_bytes=0)
        if judge(by_formula, self.sized.device)[0] == "fits":
            return
        from memfit.estimators.sizing.trace_search import call_over

        def is_over(peak_bytes: int) -> bool:
            need = replace(by_formula, peak_bytes=peak_bytes + self._beyond(formula, workload))
            return judge(need, self.sized.device)[0] in refused

        if call := call_over(formula, workload, is_over):
            yield for_phases(model, frozenset({call})).requirement(workload)

    def _beyond(self, formula: SizedModel, workload: Workload) -> int:
        """About how much more the trace finds than the formula: as for what was traced last."""
        for (_, traced), view in reversed(self._views.items()):
            if is_known(view, traced):
                derived = formula.figures_for(traced).moment
                beyond = view.figures_for(traced).moment.nbytes - derived.nbytes
                workspace = formula.figures_for(workload).moment.workspace_bytes
                return beyond * workspace // max(1, derived.workspace_bytes)
        return 0

    def _least(self, settings: RequestSettings, prompt_tokens: int | None) -> int:
        """A part of the need that is quick to compute; a trace finds no less than the formula."""
        workload = self.workload_with(settings, prompt_tokens)
        if (formula := self._formula_of(settings)) is None:
            model = self.model(settings.weight_bits)
            return least_bytes(model.runtime_model, workload) + model.margin_bytes
        need = formula.requirement(workload)
        return need.peak_bytes - need.error_bytes

    def best(
        self, candidates: Iterable[RequestSettings], prompt_tokens: int | None = None
    ) -> tuple[RequestSettings, ...]:
        """Return the first candidate that fits, after the first before it that fits tightly."""
        tight: tuple[RequestSettings, ...] = ()
        for settings in candidates:
            try:
                verdict = self.reach(settings, prompt_tokens, must_fit=bool(tight))
            except (InputError, UnsupportedError):
                continue
            if verdict == "fits":
                return (*tight, settings)
            if verdict == "tight" and not tight:
                tight = (settings,)
        return tight

    def cheapest(self) -> tuple[RequestSettings, ...]:
        """Return the cheapest set that makes the request fit, after one that fits tightly."""
        return self.best(self.candidates())

    def with_best_step(
        self, settings: RequestSettings, prompt_tokens: int | None = None
    ) -> RequestSettings:
        """Return the settings with the largest prefill step that fits, unchanged without one."""
        steps = (replace(settings, prefill_step=step) for step in self.steps())
        return (settings, *self.best(steps, prompt_tokens))[-1]

    def dearer_steps(self) -> tuple[int, ...]:
        """Return the smaller prefill steps that need more than that of the request.

        The next smaller one is computed for it, of others only those that were needed anyway.
        """
        smaller = [replace(self.requested, prefill_step=step) for step in self.steps()[1:]]
        known = [
            each
            for place, each in enumerate(smaller)
            if self._is_known(each) or (not place and not self.formula)
        ]
        return tuple(each.prefill_step for each in known if self._is_dearer(each))

    def _is_known(self, settings: RequestSettings, prompt_tokens: int | None = None) -> bool:
        workload = self.workload_with(settings, prompt_tokens)
        model = self.model(settings.weight_bits)
        # A view that is not there yet knows nothing, and to make it may take a trace.
        return is_known(self._views.get((settings.weight_bits, workload), model), workload)

    def _is_dearer(self, settings: RequestSettings) -> bool:
        pair = [self.workload_with(each) for each in (self.requested, settings)]
        model = comparing(self.sized, *pair)
        if model is self.sized:
            usual, other = map(self.need, (self.requested, settings))
        else:
            usual, other = map(model.requirement, pair)
        return other.peak_bytes > usual.peak_bytes

    def longest_with(self, settings: RequestSettings) -> int:
        """Return the longest prompt that fits with exactly these settings, 0 when none does."""
        model = self.model(settings.weight_bits)
        workload, most = self.workload_with(settings), longest_prompt(model)
        if self.formula is not None and settings.weight_bits is None:
            from memfit.estimators.sizing.trace_search import TraceSearch

            return TraceSearch(model, self.formula, workload).longest_context(most) or 0
        return longest_context(model, workload, most) or 0

    def longest(self, settings: RequestSettings) -> Longest:
        """Return the longest prompt with any prefill step, and the largest step it fits with."""
        model, steps = self.model(settings.weight_bits), self.steps()
        most = longest_prompt(model) // CONTEXT_STEP * CONTEXT_STEP
        device = model.device
        if device is None or least_excess(model, device) > 0:
            return Longest(0, settings)
        # The smallest step mostly runs the longest prompt: it is searched whole, another one only
        # if it runs a longer one.
        best, *others = (replace(settings, prefill_step=step) for step in reversed(steps))
        tokens = longest_context(model, self.workload_with(best), most) or 0
        for each in reversed(others):  # the largest first
            workload, longer = self.workload_with(each), tokens + CONTEXT_STEP
            if longer <= most and self._fits(model, workload, longer):
                tokens = longest_context(model, workload, most, fits_at=longer) or tokens
                best = each
            elif best.prefill_step < each.prefill_step and self._fits(model, workload, tokens):
                best = each
        return Longest(tokens, best if tokens else settings)

    def step_at(self, settings: RequestSettings, tokens: int) -> int | None:
        """Return the largest prefill step that a prompt fits with, None where none does.

        The smallest step decides whether there is one: it needs the least.
        """
        model, steps = self.model(settings.weight_bits), self.steps()

        def fits(step: int) -> bool:
            workload = self.workload_with(replace(settings, prefill_step=step)).prompt_only(tokens)
            least = least_bytes(model.runtime_model, workload) + model.margin_bytes
            quick = Need(least, 0, budget=model.runtime_model.runtime.budget)
            is_open = judge(quick, model.device)[0] == "fits"
            return is_open and self._fits(model, workload, tokens)

        if fits(steps[0]):
            return steps[0]
        if len(steps) == 1 or not fits(steps[-1]):
            return None
        return next(step for step in steps[1:] if fits(step))

    def _fits(self, model: SizedModel, workload: Workload, tokens: int) -> bool:
        return is_accepted(partial(fits_comfortably, model), workload.prompt_only(tokens))

    def convert_all(self) -> None:
        """Convert the weights to all bits, so that searches on other machines reuse them."""
        for bits in self.weight_bits:
            is_accepted(self.converts, replace(self.requested, weight_bits=bits))

    def by_formula(self) -> "JointSearch":
        """Return the search with figures by formula, itself where they are."""
        if self.formula is None:
            return self
        # Each prompt of other weights would take traces of its own.
        bits = (
            () if isinstance(self.formula.runtime_model.source, Interpolated) else self.weight_bits
        )
        return replace(self, sized=self.formula, formula=None, weight_bits=bits)

    def conversion(self, weight_bits: int | None) -> ConversionMemory | None:
        """Return what converting the weights takes on this machine, None if nothing is known."""
        sized = self.model(weight_bits)
        plan, device = sized.footprint.plan, sized.device
        if plan is None or not plan.converting:
            return None
        # Few estimates advise a conversion.
        from memfit.estimators.sizing.conversion import conversion_memory, judged

        key = weight_bits, device.gpu if device else None
        if key not in self._conversions:
            self._conversions[key] = conversion_memory(sized)
        known = self._conversions[key]
        return judged(known, sized) if known else None

    def on(self, device: Device) -> "JointSearch":
        """Return the same search on another machine."""
        variants: dict[int, SizedModel | UnsupportedError] = {
            bits: each if isinstance(each, UnsupportedError) else each.on(device)
            for bits, each in self._variants.items()
        }
        return replace(self, sized=self.sized.on(device), _variants=variants, _views={}, bounds={})


MAC_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Memory in GiB of the Macs that are looked through."""


def macs(search: JointSearch) -> list[JointSearch]:
    """Return a search on each Mac larger than its own, the smallest first.

    No Mac is larger than a machine that is none. Figures are computed once for all of them.
    """
    own = search.sized.device
    if (own and own.backend != "metal") or search.sized.runtime_model.facet(NvidiaOnly):
        return []
    least = own.memory_bytes if own else 0
    larger = []
    search.convert_all()
    for size in MAC_SIZES:
        if size * GIB > least:
            search = search.on(memory_device(size * GIB))
            larger.append(search)
    return larger


def smallest_mac(
    ladder: Sequence[JointSearch], find: Callable[[JointSearch], tuple[RequestSettings, ...]]
) -> tuple[JointSearch, RequestSettings] | None:
    """Return the first Mac on which the settings that ``find`` returns fit, with them."""
    for on_mac in ladder:
        settings = find(on_mac)
        if settings and on_mac.verdict(settings[-1]) == "fits":
            return on_mac, settings[-1]
    return None
