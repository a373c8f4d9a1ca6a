"""Settings recommended for a workload, each with its reason and what would change it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import open_limit, open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import (
    LEAST_LEFT_BYTES,
    RISK,
    WORKING_SET,
    Device,
    wired_limit,
)
from memfit.estimators.results.advice import (
    Advice,
    Recommendation,
    impossible,
    no_recommendation,
    not_applicable,
)
from memfit.estimators.results.result import both_units
from memfit.estimators.runtimes.facets import OnMlx, SplitMemory, runs_kv_bits
from memfit.estimators.runtimes.runtime import OF_RUNTIME, Need, comfortable_bytes, judge
from memfit.estimators.sizing.joint import JointSearch, RequestSettings
from memfit.estimators.sizing.opening import weight_bits_of
from memfit.estimators.sizing.run_limits import run_limits
from memfit.estimators.sizing.search import CONTEXT_STEP, longest_context, longest_prompt
from memfit.estimators.sizing.sized_model import SizedModel

if TYPE_CHECKING:
    from memfit.estimators.sizing.trace_search import TraceSearch

_NOT_SEARCHED = not_applicable("other machines are not searched")


def recommend(
    search: JointSearch, fitting: Sequence[RequestSettings], *, memory: Advice = _NOT_SEARCHED
) -> Recommendation:
    """Return what to do with each setting, by those that fit, the cheapest last.

    Without a device nothing but the ``memory`` of the machine is known; nothing is known where a
    part of the model is on a host of unknown size.
    """
    device, split = search.sized.device, search.sized.runtime_model.facet(SplitMemory)
    host = split.host_need(0) if split else None
    if device is None:
        return no_recommendation("no device is named", memory)
    if host and host.is_undecided:
        return no_recommendation("the host's memory is not known: give --host-memory", memory)
    contexts = _context_search(search.sized, search.workload)
    recommender = _Recommender(search, fitting, device, contexts)
    context = recommender.context()
    recommendation = Recommendation(
        context_tokens=context,
        prefill_step=recommender.prefill_step(),
        kv_bits=recommender.kv_bits(),
        weight_bits=recommender.weight_bits(),
        memory_bytes=memory,
        wired_limit_bytes=recommender.wired_limit(context.value),
        wired_limit_mb=recommender.system_limit(),
    )
    return both_units(recommendation)


_CHANGES = {
    "weight_bits": "weights of {} bits",
    "kv_bits": "KV of {} bits",
    "prefill_step": "prefill step {}",
}


def with_changes(settings: Mapping[str, int]) -> str:
    """Return the settings that an advice assumes to be changed too, after what it says.

    >>> with_changes({"weight_bits": 4, "prefill_step": 512})
    ' with weights of 4 bits and prefill step 512'
    """
    parts = [text.format(settings[name]) for name, text in _CHANGES.items() if name in settings]
    return f" with {' and '.join(parts)}" if parts else ""


class DirectSearch(Struct):
    """The search for settings of a workload, each judged by the figures of one model."""

    sized: SizedModel
    """The model with the figures that decide."""
    workload: Workload
    """The workload that settings are searched for."""
    too_long: int | None = None
    """The shortest prompt that does not fit."""
    by: ClassVar[str] = ""
    """How a requirement was found that is not as good as the estimate: there is none."""

    def longest_context(self, most: int) -> int | None:
        """Return the longest multiple of 256 up to ``most`` that fits, None when none does."""
        longest = longest_context(self.sized, self.workload, most)
        self.too_long = (longest or 0) + CONTEXT_STEP
        return longest

    def requirement(self, workload: Workload) -> Need:
        return self.sized.requirement(workload)

    def caveat(self, _: Workload) -> str:
        """Return nothing: every requirement is as good as the estimate."""
        return ""


def recommend_here(sized: SizedModel, workload: Workload) -> Recommendation:
    """Return what to do with each setting on the model's device, without other weights."""
    formula = sized.formula_view() if sized.runtime_model.source.method == "trace" else None
    search = JointSearch(sized, workload, formula=formula)
    return recommend(search, search.cheapest() if sized.device else ())


def recommended_context(sized: SizedModel, workload: Workload) -> int | None:
    """Return the longest prompt that fits, all else as in the workload; None when none does."""
    search = _context_search(sized, workload)
    return search.longest_context(longest_prompt(sized)) if sized.device else None


def _context_search(sized: SizedModel, workload: Workload) -> "DirectSearch | TraceSearch":
    formula = sized.formula_view()
    if sized.runtime_model.source.method != "trace":
        return DirectSearch(formula, workload)
    # The formulas alone need none of it.
    from memfit.estimators.sizing.trace_search import TraceSearch

    return TraceSearch(sized, formula, workload)


class _Recommender:
    """One method for each setting."""

    def __init__(
        self,
        joint: JointSearch,
        fitting: Sequence[RequestSettings],
        device: Device,
        search: "DirectSearch | TraceSearch",
    ) -> None:
        self._joint, self._device, self._search = joint, device, search
        self._sized, self._workload = joint.sized, joint.workload
        # The cheapest settings that fit, else those that fit tightly.
        self._chosen = fitting[-1] if fitting else None
        is_tight = self._chosen and joint.stated_verdict(self._chosen) == "tight"
        self._tightly = " tightly" if is_tight else ""

    def _assumed(self, name: str) -> tuple[dict[str, int], str]:
        """The other settings that one is advised with, and what a reason adds to "fits"."""
        assert self._chosen is not None
        others = self._chosen.changes(self._joint.requested)
        others.pop(name, None)
        return others, self._tightly + with_changes(others)

    def context(self) -> Advice:
        """The longest prompt that fits, everything else as in the workload."""
        most = longest_prompt(self._sized)
        context = self._search.longest_context(most)
        tight = () if context is None else self._tight_limits(context)
        too_long = self._search.too_long
        if too_long is not None and too_long <= most:
            start = f"{context} tokens" if context else "none"
            reason = "; ".join((start, self._obstacle(too_long), *tight))
        else:
            within = self._within_limits(context, most) + self._caveat(context, "; ")
            reason = "; ".join((within, *tight))
        if context is None:
            return impossible(reason)
        is_enough = context >= self._workload.total_tokens
        return Advice("keep" if is_enough else "change", context, reason)

    def _tight_limits(self, context: int) -> tuple[str, ...]:
        limits = run_limits(self._sized, self._workload.prompt_only(context))
        return tuple(each.reason for each in limits if each.verdict == "tight")

    def _within_limits(self, context: int | None, most: int) -> str:
        limit = self._sized.model.max_context
        if context is None:
            return f"no multiple of {CONTEXT_STEP} is within the limit of {most} tokens"
        if most == self._sized.runtime_model.runtime.max_context != limit:
            return f"{context} tokens fit; {self._sized.runtime} is set to at most {most}"
        if most != limit:
            return f"{context} tokens, the longest that is searched, fit"
        if context == limit:
            return f"{context} tokens, the model's own limit, fit"
        return f"{context} tokens fit; the model's own limit is {limit}"

    def prefill_step(self) -> Advice:
        """The largest step of the cheapest settings."""
        requested, dearer = self._workload.prefill_step, self._dearer_steps()
        if self._chosen is None:
            least = self._joint.steps()[-1]
            return impossible(
                f"none from {requested} down to {least} makes this workload fit{dearer}"
            )
        step = self._chosen.prefill_step
        assumes, fits = self._assumed("prefill_step")
        if step == requested:
            return Advice("keep", step, f"{step} fits{fits}{dearer}", assumes)
        return Advice("change", step, f"{step} is the largest that fits{fits}{dearer}", assumes)

    def kv_bits(self) -> Advice:
        """The most bits of the cache in the cheapest settings."""
        if not runs_kv_bits(self._sized.runtime_model, self._workload):
            return not_applicable(
                f"{self._sized.runtime} does not quantise the cache of this workload"
            )
        if self._chosen is None:
            return impossible("no quantisation of the cache makes this workload fit")
        bits, plain = self._chosen.kv_bits, dtypes.BITS[self._sized.model.dtype]
        assumes, fits = self._assumed("kv_bits")
        if bits == self._workload.kv_bits:
            kept = f"the cache of {bits} bits" if bits else "the unquantised cache"
            return Advice("keep", bits or plain, f"{kept} fits{fits}", assumes)
        why = f"{bits} bits from the first token on make this workload fit{fits}"
        return Advice("change", bits, why, assumes)

    def weight_bits(self) -> Advice:
        """The most bits of the weights in the cheapest settings."""
        choices = self._joint.weight_bits
        if not choices:
            why = "the weights are quantised already, or mlx_lm.convert does not make them"
            if not self._sized.runtime_model.facet(OnMlx):
                why = f"{self._sized.runtime} converts no weights"
            elif fewer := weight_bits_of(self._sized):
                why = f"fewer are not searched here: memfit estimate --quantize {fewer[0]}"
            return not_applicable(why)
        plan = self._sized.footprint.plan
        now = plan.default.bits if plan else dtypes.BITS[self._sized.model.dtype]
        if self._chosen is None:
            return impossible(f"none from {now} down to {choices[-1]} fits")
        bits = self._chosen.weight_bits
        assumes, fits = self._assumed("weight_bits")
        if bits is None:
            return Advice("keep", now, f"the weights of {now} bits fit{fits}", assumes)
        by = f", {self._search.by}" if self._search.by else ""
        why = f"{bits} is the most that fits{fits}{by}; mlx_lm.convert makes them"
        return Advice("change", bits, why, assumes)

    def wired_limit(self, context: int | None) -> Advice:
        """The wired limit for the recommended context, else for the workload."""
        if not self._sized.runtime_model.facet(OnMlx):
            return not_applicable(f"{self._sized.runtime} sets no wired limit")
        if self._device.backend != "metal":
            return not_applicable("MLX has a wired limit on Macs only")
        if context is None:
            tokens = self._workload.total_tokens
            need = self._sized.requirement(self._workload).peak_bytes
        else:
            tokens = context
            need = self._search.requirement(self._workload.prompt_only(context)).peak_bytes
        limit = wired_limit(need, self._device).nbytes
        if limit == need:
            text = f"{open_size(need)} keeps all of {tokens} tokens resident"
            return Advice("keep", limit, text + self._caveat(context, ", "))
        text = (
            f"{open_limit(limit)}, the {self._device.budget}, is the most"
            f" MLX accepts; {tokens} tokens need {open_size(need)}"
        )
        return Advice("keep", limit, text)

    def system_limit(self) -> Advice:
        """The sysctl that makes room for the workload, where only the working set is too small."""
        device = self._device
        if device.backend != "metal" or device.budget != WORKING_SET:
            return not_applicable("iogpu.wired_limit_mb is a setting of macOS")
        need = self._sized.requirement(self._workload)
        larger = wired_limit(need.peak_bytes, device)
        exceeded, mebibytes = judge(need, device)[1], larger.sysctl_mebibytes
        if "working_set" not in exceeded:
            return Advice("keep", 0, f"the default, {open_limit(device.working_set_bytes)}")
        if mebibytes is None or exceeded != ("working_set",):
            return impossible(
                f"{open_size(need.peak_bytes)} do not fit this Mac with any value of it that"
                f" leaves the system {open_size(LEAST_LEFT_BYTES)}"
            )
        why = (
            f"sudo sysctl iogpu.wired_limit_mb={mebibytes} would make room for the"
            f" {self._workload.total_tokens} tokens asked for and leave the system"
            f" {open_limit(larger.left_for_system_bytes)}; {RISK}"
        )
        return Advice("change", mebibytes, why)

    def _dearer_steps(self) -> str:
        dearer = self._joint.dearer_steps()
        if not dearer:
            return ""
        return f"; a step of {' or '.join(map(str, dearer))} takes more memory, not less"

    def _obstacle(self, tokens: int) -> str:
        """Why a prompt of ``tokens`` is too long."""
        longer = self._workload.prompt_only(tokens)
        try:
            need = self._search.requirement(longer)
        except UnsupportedError as error:
            return f"{tokens} cannot be run: {error}"
        by = f" {self._search.by}" if self._search.caveat(longer) else ""
        device, exceeded = self._device, judge(need, self._device)[1]
        if need.budget and OF_RUNTIME.intersection(exceeded):
            what, gets = ("a cache of ", "its cache") if need.budget.for_cache else ("", "itself")
            return (
                f"{tokens} would need{by} {what}{open_size(need.budgeted_bytes)}, above"
                f" {open_limit(need.budget.of_device(device))}, what {self._sized.runtime}"
                f" gives {gets}"
            )
        if "memory" in exceeded:
            return (
                f"{tokens} would need {open_size(need.shared_bytes)} on GPU and host together,"
                f" above {open_limit(device.memory_bytes)}, their memory"
            )
        if "host_memory" in exceeded and need.host:
            return (
                f"{tokens} would need {open_size(need.host.nbytes)} on the host, above its"
                f" {open_limit(need.host.memory_bytes or 0)}"
            )
        largest = device.max_buffer_bytes
        if largest is not None and need.largest_buffer_bytes > largest:
            return (
                f"{tokens} would need{by} one allocation of {open_size(need.largest_buffer_bytes)},"
                f" above {open_limit(largest)}, the largest the device gives"
            )
        limit = device.working_set_bytes
        needed = f"{tokens} would need {open_size(need.peak_bytes)}{by}"
        if need.peak_bytes > (most := comfortable_bytes(limit)):
            return f"{needed}, above {open_limit(most)}, nine tenths of the {device.budget}"
        up_to = open_size(need.peak_bytes + need.error_bytes)
        return (
            f"{needed}, with its stated error up to {up_to}, above the {device.budget},"
            f" {open_limit(limit)}"
        )

    def _caveat(self, context: int | None, separator: str) -> str:
        """How a context was found that no trace confirmed."""
        if not context:
            return ""
        caveat = self._search.caveat(self._workload.prompt_only(context))
        return f"{separator}{caveat}" if caveat else ""
