"""Settings recommended for a workload, each with its reason and what would change it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.modules import Part
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import WORKING_SET, Device
from memfit.estimators.machine.wired_limit import wired_limit
from memfit.estimators.results.estimate import Recommendation
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.runtimes.expert_capacity import ExpertCapacity, expert_capacity
from memfit.estimators.sizing.search import (
    CONTEXT_STEP,
    KV_BITS,
    PREFILL_STEPS,
    first_fitting,
    fits_comfortably,
    longest_context,
    longest_prompt,
    with_kv_bits,
)
from memfit.estimators.sizing.sized_model import SizedModel

if TYPE_CHECKING:
    from memfit.estimators.sizing.trace_search import TraceSearch


def recommend(sized: SizedModel, workload: Workload, units: Units) -> Recommendation:
    """Return the settings for a workload on the model's device; empty without a device."""
    device = sized.device
    if device is None:
        return Recommendation(reasons=("name a device or a memory size for recommendations",))
    formula = sized.formula_view()
    if formula is None:
        return _by_trace_alone(sized, workload, device, units)
    recommender = _Recommender(sized, workload, device, units, _search(sized, formula, workload))
    context, why_context = recommender.context()
    step, why_step = recommender.prefill_step()
    bits, why_bits = recommender.kv_bits()
    wired, why_wired = recommender.wired_limit(context)
    experts, why_experts = recommender.expert_capacity()
    return Recommendation(
        context_tokens=context,
        wired_limit_bytes=wired,
        prefill_step=step,
        kv_bits=bits,
        expert_capacity=experts,
        reasons=(why_context, *why_wired, why_step, why_bits, *why_experts),
    )


def capacity_of(sized: SizedModel) -> ExpertCapacity | None:
    """Return the experts to keep of each layer on the model's device.

    None without a device, under a runtime other than mlx-lm, and for a model without experts or
    with different numbers of them.
    """
    device = sized.device
    if device is None or not sized.runtime_model.is_mlx_lm:
        return None
    counts = {moe.experts for moe in sized.model.experts().values()}
    expert_bytes = sized.footprint.by_part[Part.EXPERTS.value]
    if len(counts) != 1 or not expert_bytes or sized.footprint.basis == "bound":
        return None
    return expert_capacity(
        working_set_bytes=device.working_set_bytes,
        other_bytes=sized.footprint.loaded_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        experts=counts.pop(),
    )


class DirectSearch(Struct):
    """The search for settings of a workload, each judged by the figures of one model."""

    sized: SizedModel
    """The model with the figures that decide."""
    workload: Workload
    """The workload that settings are searched for."""
    too_long: int | None = None
    """The shortest prompt that does not fit."""

    def longest_context(self, most: int) -> int | None:
        """Return the longest multiple of 256 up to ``most`` that fits, None when none does."""
        found = longest_context(self.sized, self.workload, most)
        self.too_long = (found or 0) + CONTEXT_STEP
        return found

    def fits(self, workload: Workload) -> bool:
        """Return whether a workload fits."""
        return fits_comfortably(self.sized, workload)

    def requirement(self, workload: Workload) -> Need:
        """Return what a workload needs."""
        return self.sized.requirement(workload)

    def caveat(self, _: Workload) -> str:
        """Return nothing: every requirement is as good as the estimate."""
        return ""


def _search(
    sized: SizedModel, formula: SizedModel, workload: Workload
) -> "DirectSearch | TraceSearch":
    if sized.runtime_model.method != "trace":
        return DirectSearch(formula, workload)
    # The formulas alone need none of it.
    from memfit.estimators.sizing.trace_search import TraceSearch

    return TraceSearch(sized, formula, workload)


def _by_trace_alone(
    sized: SizedModel, workload: Workload, device: Device, units: Units
) -> Recommendation:
    recommender = _Recommender(sized, workload, device, units, DirectSearch(sized, workload))
    # A trace takes long, and finds no less than the weights.
    has_room = judge(Need(sized.resident_bytes, 0), device)[0] == "fits"
    step, why_step = recommender.prefill_step(has_room=has_room)
    other = "formulas do not describe this model, and other settings are searched by them"
    return Recommendation(prefill_step=step, reasons=(why_step, other))


class _Recommender(Struct, frozen=True):
    """One method for each setting: its value, and the reason in words."""

    sized: SizedModel
    workload: Workload
    device: Device
    units: Units
    search: "DirectSearch | TraceSearch"

    def context(self) -> tuple[int | None, str]:
        """The longest prompt that fits, everything else as in the workload."""
        limit = self.sized.model.max_context
        most = longest_prompt(self.sized)
        context = self.search.longest_context(most)
        if self.search.too_long is not None and self.search.too_long <= most:
            found = f"{context} tokens" if context else "none"
            return context, f"context: {found}; {self._obstacle(self.search.too_long)}"
        if context is None:
            text = f"no multiple of {CONTEXT_STEP} is within the limit of {most} tokens"
        elif most == self.sized.runtime_model.runtime.max_context != limit:
            text = f"{context} tokens fit; {self.sized.runtime} is set to at most {most}"
        elif most != limit:
            text = f"{context} tokens, the longest that is searched, fit"
        elif context == limit:
            text = f"{context} tokens, the model's own limit, fit"
        else:
            text = f"{context} tokens fit; the model's own limit is {limit}"
        return context, f"context: {text}{self._caveat(context, '; ')}"

    def wired_limit(self, context: int | None) -> tuple[int | None, list[str]]:
        """The wired limit for the recommended context, else for the workload."""
        if self.device.backend != "metal" or not self.sized.runtime_model.on_mlx:
            return None, []
        if context is None:
            tokens = self.workload.total_tokens
            need = self.search.sized.requirement(self.workload).peak_bytes
        else:
            tokens = context
            need = self.search.requirement(self.workload.prompt_only(context)).peak_bytes
        limit = wired_limit(need, self.device).nbytes
        if limit == need:
            text = f"{self._size(need)} keeps all of {tokens} tokens resident"
            text += self._caveat(context, ", ")
        else:
            text = (
                f"{self._size(limit)}, the {self.device.budget}, is the most"
                f" MLX accepts; {tokens} tokens need {self._size(need)}"
            )
        return limit, [f"wired limit: {text}", *self._larger_working_set()]

    def prefill_step(self, *, has_room: bool = True) -> tuple[int | None, str]:
        """The largest step whose peak fits."""
        usual = self.sized.runtime_model.runtime.prefill_step
        steps = [usual, *(step for step in PREFILL_STEPS if step < usual)]
        step = first_fitting(steps if has_room else (), self._fits_with_step)
        if step is None:
            least = min(usual, PREFILL_STEPS[-1])
            text = f"none from {usual} down to {least} makes this workload fit"
        elif step == usual:
            text = f"{step}, the runtime's default, fits"
        else:
            text = f"{step} is the largest whose workspace fits"
        return step, f"prefill step: {text}"

    def kv_bits(self) -> tuple[int | None, str]:
        """The most bits of a cache that fit; None is unquantised."""
        choices = [with_kv_bits(self.workload, bits) for bits in KV_BITS]
        found = first_fitting(choices, self.search.fits)
        if found is None:
            return None, "KV bits: no quantisation of the cache makes this workload fit"
        if found.kv_bits is None:
            return None, "KV bits: the unquantised cache fits"
        text = f"{found.kv_bits} bits from the first token on make this workload fit"
        return found.kv_bits, f"KV bits: {text}"

    def expert_capacity(self) -> tuple[int | None, list[str]]:
        """Experts of each layer to keep resident, for runtimes that load the rest on demand."""
        capacity = capacity_of(self.sized)
        if capacity is None:
            return None, []
        text = (
            f"expert capacity, where experts are loaded on demand: {capacity.experts} of"
            f" {capacity.of} a layer take {self._size(capacity.resident_bytes)} of 71 % of the"
            f" working set and leave {self._size(capacity.left_bytes)} of it for the cache"
        )
        return capacity.experts, [text]

    def _obstacle(self, tokens: int) -> str:
        """Why a prompt of ``tokens`` is too long, and what would change it."""
        longer = self.workload.prompt_only(tokens)
        try:
            need = self.search.requirement(longer)
        except UnsupportedError as error:
            return f"{tokens} cannot be run: {error}"
        by = " by formula" if self.search.caveat(longer) else ""
        exceeded = judge(need, self.device)[1]
        if need.budget and {"cache_budget", "runtime_budget"}.intersection(exceeded):
            for_cache = need.budget.for_cache
            return (
                f"{tokens} would need{by} {'a cache of ' if for_cache else ''}"
                f"{self._size(need.budgeted_bytes)}, above"
                f" {self._size(need.budget.of_device(self.device))}, what {self.sized.runtime}"
                f" gives {'its cache' if for_cache else 'itself'}"
            )
        largest = self.device.max_buffer_bytes
        if largest is not None and need.largest_buffer_bytes > largest:
            return (
                f"{tokens} would need{by} one allocation of"
                f" {self._size(need.largest_buffer_bytes)}, above {self._size(largest)}, the"
                " largest the device gives"
            )
        remedy = "a quantised KV cache or a" if self._fits_quantised(longer) else "a"
        budget = self._size(self.device.working_set_bytes * 9 // 10)
        return (
            f"{tokens} would need {self._size(need.peak_bytes)}{by}, above {budget}, nine tenths"
            f" of the {self.device.budget}; {remedy} larger {self.device.budget} raises it"
        )

    def _fits_quantised(self, workload: Workload) -> bool:
        """Whether a quantised cache helps; not worth a trace."""
        quantised = [with_kv_bits(workload, bits) for bits in KV_BITS if bits]
        search = self.search if isinstance(self.search, DirectSearch) else None
        return search is not None and first_fitting(quantised, search.fits) is not None

    def _caveat(self, context: int | None, separator: str) -> str:
        """How a context was found that no trace confirmed."""
        caveat = context and self.search.caveat(self.workload.prompt_only(context))
        return f"{separator}{caveat}" if caveat else ""

    def _larger_working_set(self) -> Iterator[str]:
        """The sysctl that makes room for the workload, where only the working set is too small."""
        if self.device.budget != WORKING_SET:
            return
        need = self.sized.requirement(self.workload)
        larger = wired_limit(need.peak_bytes, self.device)
        if larger.sysctl_mebibytes and judge(need, self.device)[1] == ("working_set",):
            yield (
                f"working set: sudo sysctl iogpu.wired_limit_mb={larger.sysctl_mebibytes} would"
                f" make room for the {self.workload.total_tokens} tokens asked for and leave the"
                f" system {self._size(larger.left_for_system_bytes)}; with too little left it"
                " slows down or hangs"
            )

    def _fits_with_step(self, step: int) -> bool:
        workload = replace(self.workload, prefill_step=step)
        return self.search.fits(workload) and fits_comfortably(self.sized, workload)

    def _size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.units)
