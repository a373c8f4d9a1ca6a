"""Settings that follow from a sizing, each with its reason and what would change it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.estimators.arch.modules import Part
from memfit.estimators.arch.specs import MixtureOfExperts
from memfit.estimators.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.runtime import MLX_LM, get_runtime
from memfit.estimators.planning.budget import judge
from memfit.estimators.planning.capacity import ExpertCapacity, expert_capacity
from memfit.estimators.planning.context import (
    CONTEXT_STEP,
    KV_BITS,
    PREFILL_STEPS,
    first_fitting,
    longest_context,
)
from memfit.estimators.planning.wired import wired_limit
from memfit.estimators.result import Recommendation
from memfit.estimators.sizing import Sizing
from memfit.estimators.units import Units, format_bytes
from memfit.estimators.workload import Workload

# The longest context searched when a config names no limit of its own.
UNBOUNDED_CONTEXT = 2**20


def recommend(sizing: Sizing, workload: Workload, units: Units) -> Recommendation:
    """Return the settings for a workload on the sizing's device; empty without a device."""
    if sizing.device is None:
        return Recommendation(reasons=("name a device or a memory size for recommendations",))
    advice = _Advice(sizing, workload, sizing.device, units)
    context = advice.context()
    return Recommendation(
        context_tokens=context,
        wired_limit_bytes=advice.wired(context),
        prefill_step=advice.prefill_step(),
        kv_bits=advice.kv_bits(),
        expert_capacity=advice.capacity(),
        reasons=tuple(advice.reasons),
    )


@dataclass(slots=True)
class _Advice:
    sizing: Sizing
    workload: Workload
    device: Device
    units: Units
    reasons: list[str]

    def __init__(
        self, sizing: Sizing, workload: Workload, device: Device, units: Units
    ) -> None:
        self.sizing, self.workload, self.device, self.units = sizing, workload, device, units
        self.reasons = []

    def context(self) -> int | None:
        """The longest prompt that fits, everything else as asked."""
        most = self.sizing.model.max_context
        context = longest_context(
            lambda tokens: self._fits(self._prompt(tokens)), most or UNBOUNDED_CONTEXT
        )
        if context is None:
            self._say("context: not even 256 tokens fit in nine tenths of the working set")
        elif most and context + CONTEXT_STEP > most:
            self._say(f"context: {context} tokens, the model's own limit, fit")
        else:
            longer = self._prompt(context + CONTEXT_STEP)
            need = self._size(self.sizing.need(longer).peak_bytes)
            budget = self._size(self.device.working_set_bytes * 9 // 10)
            remedy = "a quantised KV cache or a" if self._takes_kv_bits(longer) else "a"
            self._say(
                f"context: {context} tokens; {longer.prompt_tokens} would need {need}, above"
                f" {budget}, nine tenths of the working set; {remedy} larger working set raises it"
            )
        return context

    def wired(self, context: int | None) -> int | None:
        """The wired limit for the recommended context, else for the workload."""
        if self.device.backend != "metal" or self.sizing.engine.runtime != MLX_LM:
            return None
        workload = self._prompt(context) if context else self.workload
        need = self.sizing.need(workload).peak_bytes
        limit = wired_limit(need, self.device)
        tokens = workload.total_tokens
        if limit.nbytes == need:
            self._say(f"wired limit: {self._size(need)} keeps all of {tokens} tokens resident")
        else:
            self._say(
                f"wired limit: {self._size(limit.nbytes)}, the working set, is the most MLX"
                f" accepts; {tokens} tokens need {self._size(need)}"
            )
        if limit.sysctl_mebibytes:
            self._say(
                f"working set: sudo sysctl iogpu.wired_limit_mb={limit.sysctl_mebibytes} would make"
                f" room and leave the system {self._size(limit.left_for_system_bytes)};"
                " with too little left it slows down or hangs"
            )
        return limit.nbytes

    def prefill_step(self) -> int | None:
        """The largest step whose peak fits."""
        usual = get_runtime(self.sizing.engine.runtime).prefill_step
        step = first_fitting(
            [step for step in PREFILL_STEPS if step <= usual],
            lambda step: self._fits(replace(self.workload, prefill_step=step)),
        )
        if step is None:
            self._say(f"prefill step: none from {usual} down to 128 makes this workload fit")
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

    def _takes_kv_bits(self, workload: Workload) -> bool:
        try:
            self.sizing.at(replace(workload, kv_bits=8, quantized_kv_start=0))
        except UnsupportedError:
            return False
        return bool(self.sizing.at(workload).kv.nbytes)

    def _fits_with_bits(self, bits: int | None) -> bool:
        start = self.workload.quantized_kv_start if bits is None else 0
        try:
            return self._fits(replace(self.workload, kv_bits=bits, quantized_kv_start=start))
        except UnsupportedError:
            return False

    def capacity(self) -> int | None:
        """Experts of each layer to keep resident, for runtimes that load the rest on demand."""
        capacity = capacity_of(self.sizing, self.device)
        if capacity is None or self.sizing.engine.runtime != MLX_LM:
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
        return judge(self.sizing.need(workload), self.device)[0] == "fits"

    def _size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.units)

    @property
    def _say(self) -> Callable[[str], None]:
        return self.reasons.append


def capacity_of(sizing: Sizing, device: Device) -> ExpertCapacity | None:
    """Return the expert capacity, None for a model without experts or with uneven layers."""
    counts = {
        layer.feed_forward.experts
        for layer in sizing.model.layers
        if isinstance(layer.feed_forward, MixtureOfExperts)
    }
    expert_bytes = sizing.weighed.by_part[Part.EXPERTS.value]
    if len(counts) != 1 or not expert_bytes or sizing.weighed.basis == "bound":
        return None
    return expert_capacity(
        working_set_bytes=device.working_set_bytes,
        other_bytes=sizing.weighed.loaded_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        experts=counts.pop(),
    )
