"""Settings that follow from a sizing, each with its reason and what would change it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memfit.estimators.arch.modules import Part
from memfit.estimators.arch.specs import MixtureOfExperts
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import MAX_CHUNKS, Workload
from memfit.estimators.machine.device import WORKING_SET, Device
from memfit.estimators.machine.wired_limit import wired_limit
from memfit.estimators.results.estimate import Recommendation
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.runtimes.expert_capacity import ExpertCapacity, expert_capacity
from memfit.estimators.runtimes.mlx_lm_trace import TraceEngine
from memfit.estimators.runtimes.registry import MLX_LM, ON_MLX, get_runtime
from memfit.estimators.sizing.search import (
    CONTEXT_STEP,
    KV_BITS,
    PREFILL_STEPS,
    first_fitting,
    longest_context,
)
from memfit.estimators.sizing.sized_model import SizedModel

if TYPE_CHECKING:
    from memfit.estimators.sizing.trace_search import TracedContext

# The longest context searched when a config names no limit of its own.
UNBOUNDED_CONTEXT = 2**20


def longest_prompt(limit: int | None, workload: Workload) -> int:
    """Return the longest prompt to look at: the model's own limit, or what chunks allow."""
    return min(limit or UNBOUNDED_CONTEXT, MAX_CHUNKS * workload.prefill_step)


def recommend(sized: SizedModel, workload: Workload, units: Units) -> Recommendation:
    """Return the settings for a workload on the sizing's device; empty without a device."""
    if sized.device is None:
        return Recommendation(reasons=("name a device or a memory size for recommendations",))
    searching = sized.formula_view()
    if searching is None:
        return _by_trace_alone(sized, workload, sized.device, units)
    confirming = None
    if isinstance(sized.engine, TraceEngine):
        # The formulas alone need none of it.
        from memfit.estimators.sizing.trace_search import TracedContext

        confirming = TracedContext(sized, searching, sized.device, workload)
    advice = _Advice(sized, workload, sized.device, units, searching, confirming)
    context = advice.context()
    return Recommendation(
        context_tokens=context,
        wired_limit_bytes=advice.wired(context),
        prefill_step=advice.prefill_step(),
        kv_bits=advice.kv_bits(),
        expert_capacity=advice.capacity(),
        reasons=tuple(advice.reasons),
    )


def _by_trace_alone(
    sized: SizedModel, workload: Workload, device: Device, units: Units
) -> Recommendation:
    advice = _Advice(sized, workload, device, units, searching=sized)
    return Recommendation(
        prefill_step=advice.prefill_step(),
        reasons=(
            *advice.reasons,
            "formulas do not describe this model, and other settings are searched by them",
        ),
    )


@dataclass(slots=True)
class _Advice:
    sized: SizedModel
    workload: Workload
    device: Device
    units: Units
    searching: SizedModel  # asked of many prompts, where the sizing itself may be slow
    confirming: "TracedContext | None" = None  # where prompts are searched by formula for a trace
    reasons: list[str] = field(default_factory=list)

    def context(self) -> int | None:
        """The longest prompt that fits, everything else as asked."""
        limit = self.sized.model.max_context
        most = longest_prompt(limit, self.workload)
        context = self._longest(most)
        too_long = self._shortest_too_long(context)
        by = f"; {self._untraced()}" if context and not self._is_traced(context) else ""
        if too_long <= most:
            found = f"{context} tokens" if context else "none"
            self._say(f"context: {found}; {self._obstacle(too_long)}")
        elif context is None:
            self._say(f"context: no multiple of {CONTEXT_STEP} is within the {most} tokens allowed")
        elif most != limit:
            self._say(f"context: {context} tokens, the most that was looked at, fit{by}")
        elif context == limit:
            self._say(f"context: {context} tokens, the model's own limit, fit{by}")
        else:
            self._say(f"context: {context} tokens fit; the model's own limit is {limit}{by}")
        return context

    def _longest(self, most: int) -> int | None:
        if self.confirming:
            return self.confirming.longest(most)
        return longest_context(lambda tokens: self._found_to_fit(self._prompt(tokens)), most)

    def _shortest_too_long(self, context: int | None) -> int:
        known = self.confirming.too_long if self.confirming else None
        return known or (context or 0) + CONTEXT_STEP

    def _is_traced(self, tokens: int) -> bool:
        return not self.confirming or self.confirming.is_traced(self._prompt(tokens))

    def _untraced(self) -> str:
        _, percent = self.searching.workspace_basis(self.workload)
        return f"by formula, its workspace raised by the {percent} % it may be wrong"

    def _obstacle(self, tokens: int) -> str:
        """Why a prompt of ``tokens`` is too long, and what would change it."""
        longer = self._prompt(tokens)
        by = "" if self._is_traced(tokens) else " by formula"
        try:
            need = (self.confirming or self.searching).requirement(longer)
        except UnsupportedError as error:
            return f"{tokens} cannot be run: {error}"
        largest = self.device.max_buffer_bytes
        if largest is not None and need.largest_buffer_bytes > largest:
            return (
                f"{tokens} would need{by} one allocation of"
                f" {self._size(need.largest_buffer_bytes)}, above {self._size(largest)}, the"
                " largest the device gives"
            )
        remedy = "a quantised KV cache or a" if self._quantised_to_fit(longer) else "a"
        budget = self._size(self.device.working_set_bytes * 9 // 10)
        return (
            f"{tokens} would need {self._size(need.peak_bytes)}{by}, above {budget}, nine tenths"
            f" of the {self.device.budget}; {remedy} larger {self.device.budget} raises it"
        )

    def _quantised_to_fit(self, workload: Workload) -> bool:
        """By formula alone: what it says would be no remedy by trace."""
        quantised = (replace(workload, kv_bits=b, quantized_kv_start=0) for b in KV_BITS if b)
        return not self.confirming and any(map(self._found_to_fit, quantised))

    def wired(self, context: int | None) -> int | None:
        """The wired limit for the recommended context, else for the workload."""
        if self.device.backend != "metal" or self.sized.engine.runtime not in ON_MLX:
            return None
        workload = self._prompt(context) if context else self.workload
        need = self._wired_need(context)
        limit = wired_limit(need, self.device)
        tokens = workload.total_tokens
        if limit.nbytes == need:
            by = f", {self._untraced()}" if context and not self._is_traced(context) else ""
            self._say(f"wired limit: {self._size(need)} keeps all of {tokens} tokens resident{by}")
        else:
            self._say(
                f"wired limit: {self._size(limit.nbytes)}, the {self.device.budget}, is the most"
                f" MLX accepts; {tokens} tokens need {self._size(need)}"
            )
        self._raise_working_set()
        return limit.nbytes

    def _wired_need(self, context: int | None) -> int:
        if context is None:
            asked = self.sized if self.confirming else self.searching
            return asked.requirement(self.workload).peak_bytes
        return (self.confirming or self.searching).requirement(self._prompt(context)).peak_bytes

    def _raise_working_set(self) -> None:
        """The setting that would make room for what was asked, where that is all it lacks."""
        if self.device.budget != WORKING_SET:
            return
        need = self.sized.requirement(self.workload)
        raised = wired_limit(need.peak_bytes, self.device)
        if raised.sysctl_mebibytes and judge(need, self.device)[1] == ("working_set",):
            self._say(
                f"working set: sudo sysctl iogpu.wired_limit_mb={raised.sysctl_mebibytes} would"
                f" make room for the {self.workload.total_tokens} tokens asked for and leave the"
                f" system {self._size(raised.left_for_system_bytes)}; with too little left it"
                " slows down or hangs"
            )

    def prefill_step(self) -> int | None:
        """The largest step whose peak fits."""
        usual = get_runtime(self.sized.engine.runtime).prefill_step
        step = first_fitting(
            [usual, *(step for step in PREFILL_STEPS if step < usual)],
            self._fits_with_step,
        )
        if step is None:
            least = min(usual, PREFILL_STEPS[-1])
            self._say(f"prefill step: none from {usual} down to {least} makes this workload fit")
        elif step == usual:
            self._say(f"prefill step: {step}, the runtime's default, fits")
        else:
            self._say(f"prefill step: {step} is the largest whose workspace fits")
        return step

    def kv_bits(self) -> int | None:
        """The widest cache that fits; None is unquantised."""
        found = first_fitting(KV_BITS, self._fits_with_bits)
        if self._fits_with_bits(None):
            self._say("KV bits: the unquantised cache fits")
        elif found:
            self._say(f"KV bits: {found} bits from the first token on make this workload fit")
        else:
            self._say("KV bits: no quantisation of the cache makes this workload fit")
        return found

    def _fits_with_step(self, step: int) -> bool:
        if self.workload.prompt_tokens > step * MAX_CHUNKS:
            return False
        workload = replace(self.workload, prefill_step=step)
        if isinstance(self.sized.engine, TraceEngine):
            return self._traced_to_fit(workload)
        return self._found_to_fit(workload) and self._fits(workload)

    def _traced_to_fit(self, workload: Workload) -> bool:
        try:
            return self._leaves_room(workload) and self._fits(workload)
        except UnsupportedError:
            return False

    def _leaves_room(self, workload: Workload) -> bool:
        """Whether weights, and caches by formula, fit: a trace takes long and finds no less."""
        kept = self.sized.resident_bytes
        if self.searching is not self.sized:
            figures = self.searching.figures_for(workload)
            kept += figures.kv.nbytes + figures.ssm_bytes
        return judge(Need(kept, 0), self.device)[0] == "fits"

    def _fits_with_bits(self, bits: int | None) -> bool:
        start = self.workload.quantized_kv_start if bits is None else 0
        workload = replace(self.workload, kv_bits=bits, quantized_kv_start=start)
        return (self._traced_to_fit if self.confirming else self._found_to_fit)(workload)

    def capacity(self) -> int | None:
        """Experts of each layer to keep resident, for runtimes that load the rest on demand."""
        capacity = capacity_of(self.sized, self.device)
        if capacity is None or self.sized.engine.runtime != MLX_LM:
            return None
        self._say(
            f"expert capacity, where experts are loaded on demand: {capacity.experts} of"
            f" {capacity.of} a layer take {self._size(capacity.resident_bytes)} of 71 % of the"
            f" working set and leave {self._size(capacity.left_bytes)} of it for the cache"
        )
        return capacity.experts

    def _prompt(self, tokens: int) -> Workload:
        return replace(self.workload, prompt_tokens=tokens, max_tokens=0)

    def _fits(self, workload: Workload) -> bool:
        return self._judged(self.sized, workload)

    def _found_to_fit(self, workload: Workload) -> bool:
        return self._judged(self.searching, workload)

    def _judged(self, sized: SizedModel, workload: Workload) -> bool:
        try:
            return judge(sized.requirement(workload), self.device)[0] == "fits"
        except UnsupportedError:
            return False

    def _size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.units)

    @property
    def _say(self) -> Callable[[str], None]:
        return self.reasons.append


def capacity_of(sized: SizedModel, device: Device) -> ExpertCapacity | None:
    """Return the expert capacity, None for a model without experts or with uneven layers."""
    counts = {
        layer.feed_forward.experts
        for layer in sized.model.layers
        if isinstance(layer.feed_forward, MixtureOfExperts)
    }
    expert_bytes = sized.footprint.by_part[Part.EXPERTS.value]
    if len(counts) != 1 or not expert_bytes or sized.footprint.basis == "bound":
        return None
    return expert_capacity(
        working_set_bytes=device.working_set_bytes,
        other_bytes=sized.footprint.loaded_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        experts=counts.pop(),
    )
