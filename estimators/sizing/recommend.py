"""Settings recommended for a workload, each with its reason and what would change it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET, Struct
from msgspec.structs import replace

from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import WORKING_SET, Device
from memfit.estimators.machine.working_set import LEAST_LEFT_BYTES, RISK, wired_limit
from memfit.estimators.results.estimate import (
    Action,
    Advice,
    PartialExperts,
    Recommendation,
    Recommended,
    ServerRun,
)
from memfit.estimators.runtimes.budget import OF_RUNTIME, Need, comfortable_bytes, judge
from memfit.estimators.runtimes.run_limits import run_limits
from memfit.estimators.sizing.actions import Answer
from memfit.estimators.sizing.joint import JointSearch, Settings
from memfit.estimators.sizing.search import CONTEXT_STEP, longest_context, longest_prompt
from memfit.estimators.sizing.serving import served_here
from memfit.estimators.sizing.sized_model import SizedModel

if TYPE_CHECKING:
    from memfit.estimators.sizing.trace_search import TraceSearch

_NO_DEVICE = Advice("not_applicable", None, "no device is named")
_NO_HOST = Advice("not_applicable", None, "the host's memory is not known: give --host-memory")
_NOT_SEARCHED = Advice("not_applicable", None, "other machines are not searched")


def recommend(
    search: JointSearch, units: Units, answer: Answer, *, memory: Advice = _NOT_SEARCHED
) -> Recommendation:
    """Return what to do with each setting, by the answer that a search found.

    Without a device nothing but the ``memory`` of the machine is known; nothing is known where a
    part of the model is on a host of unknown size.
    """
    device, host = search.sized.device, search.sized.runtime_model.host_need(0)
    if device is None or (host and host.is_undecided):
        unknown = _NO_HOST if device else _NO_DEVICE
        return Recommendation(
            context_tokens=unknown,
            prefill_step=unknown,
            kv_bits=unknown,
            weight_bits=unknown,
            memory_bytes=memory,
            wired_limit_bytes=unknown,
            wired_limit_mb=unknown,
        )
    contexts = _context_search(search.sized, search.workload)
    recommender = _Recommender(search, answer, device, units, contexts)
    context = recommender.context()
    return Recommendation(
        context_tokens=context,
        prefill_step=recommender.prefill_step(),
        kv_bits=recommender.kv_bits(),
        weight_bits=recommender.weight_bits(),
        memory_bytes=memory,
        wired_limit_bytes=recommender.wired_limit(context.value),
        wired_limit_mb=recommender.system_limit(),
    )


def recommended(
    search: JointSearch, best: Action | None, partial: PartialExperts | None
) -> Recommended:
    """Return what to set for the best action on the machine of the search.

    Where there is none, these are the experts of a ``partial`` model.
    """
    if best is None or "memory_bytes" in best.settings:
        return replace(NOT_RECOMMENDED, expert_capacity=partial.experts if partial else None)
    sized = search.model(best.settings.get("weight_bits"))
    is_divided = best.host_bytes is not UNSET
    if best.server:
        return _of_server(sized, best.server, search.workload)
    if not best.context_tokens or is_divided:
        return _recommended(sized, best.context_tokens, None)
    chosen = replace(search.asked, **best.settings)
    needed_bytes = search.need(chosen, best.context_tokens).peak_bytes
    return _recommended(sized, best.context_tokens, needed_bytes)


def recommended_here(sized: SizedModel, workload: Workload) -> Recommended:
    """Return what to set for a workload on the model's device, without other settings."""
    if server := served_here(sized, workload):
        return _of_server(sized, server, workload)
    tokens = longest_context(sized, workload, longest_prompt(sized))
    need = sized.requirement(workload.prompt_only(tokens)) if tokens else None
    return _recommended(sized, tokens, need.peak_bytes if need else None)


NOT_RECOMMENDED = Recommended(context_tokens=None, wired_limit_bytes=None, expert_capacity=None)


def _of_server(sized: SizedModel, server: ServerRun, workload: Workload) -> Recommended:
    """What to set for a server: for its longest prompt or, if none was searched, the request's."""
    if server.context_tokens is None:
        return _recommended(sized, workload.prompt_tokens, server.needed_bytes)
    return _recommended(sized, server.context_tokens, server.context_needed_bytes)


def _recommended(sized: SizedModel, tokens: int | None, needed_bytes: int | None) -> Recommended:
    """The longest prompt, and what follows from it."""
    device, counts = sized.device, {moe.experts for moe in sized.model.experts().values()}
    is_wired = device and device.backend == "metal" and sized.runtime_model.on_mlx
    return Recommended(
        context_tokens=tokens,
        wired_limit_bytes=(
            wired_limit(needed_bytes, device).nbytes
            if device and is_wired and needed_bytes
            else None
        ),
        expert_capacity=max(counts, default=None),
    )


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
        found = longest_context(self.sized, self.workload, most)
        self.too_long = (found or 0) + CONTEXT_STEP
        return found

    def requirement(self, workload: Workload) -> Need:
        return self.sized.requirement(workload)

    def caveat(self, _: Workload) -> str:
        """Return nothing: every requirement is as good as the estimate."""
        return ""


def memory_advice(search: JointSearch, answer: Answer, units: Units) -> Advice:
    """Return the memory that a machine must have."""
    device = search.sized.device
    runs = search.sized.runtime_model.runs_on_macs
    if not runs or (device and device.backend != "metal"):
        return Advice("not_applicable", None, "only Macs are looked through")
    if device and answer.settings:
        assumes = answer.settings[-1].changes(search.asked)
        text = f"the memory of this machine is enough{with_changes(assumes)}"
        return Advice("keep", device.memory_bytes, text, assumes)
    found = answer.smallest
    if found is None or found[0].sized.device is None:
        return Advice("impossible", None, "no Mac is large enough")
    on_mac, settings = found
    need, mac = on_mac.need(settings), found[0].sized.device
    assumes = settings.changes(search.asked)
    why = f"the smallest Mac that fits{with_changes(assumes)} has"
    why += f" {format_bytes(mac.memory_bytes, Units.GIB)}"
    needed = max(need.peak_bytes, need.shared_bytes)
    why += f", for {format_bytes(needed, units)}"
    return Advice("change", mac.memory_bytes, why, assumes)


def recommend_here(sized: SizedModel, workload: Workload, units: Units) -> Recommendation:
    """Return what to do with each setting on the model's device, without other weights."""
    formula = sized.formula_view() if sized.runtime_model.method == "trace" else None
    search = JointSearch(sized, workload, formula=formula)
    return recommend(search, units, Answer(search.cheapest() if sized.device else ()))


def recommended_context(sized: SizedModel, workload: Workload) -> int | None:
    """Return the longest prompt that fits, all else as in the workload; None when none does."""
    search = _context_search(sized, workload)
    return search.longest_context(longest_prompt(sized)) if sized.device else None


def _context_search(sized: SizedModel, workload: Workload) -> "DirectSearch | TraceSearch":
    formula = sized.formula_view()
    if sized.runtime_model.method != "trace":
        return DirectSearch(formula, workload)
    # The formulas alone need none of it.
    from memfit.estimators.sizing.trace_search import TraceSearch

    return TraceSearch(sized, formula, workload)


class _Recommender(Struct, frozen=True):
    """One method for each setting."""

    joint: JointSearch
    answer: Answer
    device: Device
    units: Units
    search: "DirectSearch | TraceSearch"

    @property
    def _sized(self) -> SizedModel:
        return self.joint.sized

    @property
    def _workload(self) -> Workload:
        return self.joint.workload

    @property
    def _chosen(self) -> Settings | None:
        """The cheapest settings that fit, else those that fit tightly."""
        return self.answer.settings[-1] if self.answer.settings else None

    @property
    def _tightly(self) -> str:
        """What a reason adds to "fits" where the chosen settings only fit tightly."""
        chosen = self._chosen
        return " tightly" if chosen and self.joint.stated_verdict(chosen) == "tight" else ""

    def _assumed(self, name: str) -> tuple[dict[str, int], str]:
        """The other settings that one is advised with, and what a reason adds to "fits"."""
        assert self._chosen is not None
        others = self._chosen.changes(self.joint.asked)
        others.pop(name, None)
        return others, self._tightly + with_changes(others)

    def context(self) -> Advice:
        """The longest prompt that fits, everything else as in the workload."""
        most = longest_prompt(self._sized)
        context = self.search.longest_context(most)
        if self.search.too_long is not None and self.search.too_long <= most:
            found = f"{context} tokens" if context else "none"
            reason = f"{found}; {self._obstacle(self.search.too_long)}"
        else:
            reason = self._within_limits(context, most)
            reason += self._caveat(context, "; ")
        if context is None:
            return Advice("impossible", None, reason)
        limits = run_limits(self._sized.runtime_model, self._workload.prompt_only(context))
        reason = "; ".join((reason, *(each.reason for each in limits if each.verdict == "tight")))
        is_enough = context >= self._workload.total_tokens
        return Advice("keep" if is_enough else "change", context, reason)

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
        asked = self._workload.prefill_step
        if self._chosen is None:
            least = self.joint.steps()[-1]
            why = f"none from {asked} down to {least} makes this workload fit"
            return Advice("impossible", None, why + self._dearer_steps())
        step = self._chosen.prefill_step
        assumes, fits = self._assumed("prefill_step")
        if step == asked:
            return Advice("keep", step, f"{step} fits{fits}{self._dearer_steps()}", assumes)
        why = f"{step} is the largest that fits{fits}{self._dearer_steps()}"
        return Advice("change", step, why, assumes)

    def kv_bits(self) -> Advice:
        """The most bits of the cache in the cheapest settings."""
        asked = self._workload.kv_bits
        plain = dtypes.BITS[self._sized.model.dtype]
        if not self._sized.runtime_model.runs_kv_bits(self._workload):
            why = f"{self._sized.runtime} does not quantise the cache of this workload"
            return Advice("not_applicable", None, why)
        if self._chosen is None:
            why = "no quantisation of the cache makes this workload fit"
            return Advice("impossible", None, why)
        bits = self._chosen.kv_bits
        assumes, fits = self._assumed("kv_bits")
        if bits == asked:
            kept = f"the cache of {bits} bits" if bits else "the unquantised cache"
            return Advice("keep", bits or plain, f"{kept} fits{fits}", assumes)
        why = f"{bits} bits from the first token on make this workload fit{fits}"
        return Advice("change", bits, why, assumes)

    def weight_bits(self) -> Advice:
        """The most bits of the weights in the cheapest settings."""
        choices = self.joint.weight_bits
        if not choices:
            why = "the weights are quantised already, or mlx_lm.convert does not make them"
            if not self._sized.runtime_model.on_mlx:
                why = f"{self._sized.runtime} converts no weights"
            elif fewer := self._sized.weight_bits():
                why = f"fewer are not searched here: memfit estimate --quantize {fewer[0]}"
            return Advice("not_applicable", None, why)
        plan = self._sized.footprint.plan
        now = plan.default.bits if plan else dtypes.BITS[self._sized.model.dtype]
        if self._chosen is None:
            return Advice("impossible", None, f"none from {now} down to {choices[-1]} fits")
        bits = self._chosen.weight_bits
        assumes, fits = self._assumed("weight_bits")
        if bits is None:
            return Advice("keep", now, f"the weights of {now} bits fit{fits}", assumes)
        by = f", {self.search.by}" if self.search.by else ""
        why = f"{bits} is the most that fits{fits}{by}; mlx_lm.convert makes them"
        return Advice("change", bits, why, assumes)

    def wired_limit(self, context: int | None) -> Advice:
        """The wired limit for the recommended context, else for the workload."""
        if not self._sized.runtime_model.on_mlx:
            return Advice("not_applicable", None, f"{self._sized.runtime} sets no wired limit")
        if self.device.backend != "metal":
            return Advice("not_applicable", None, "MLX has a wired limit on Macs only")
        if context is None:
            tokens = self._workload.total_tokens
            need = self._sized.requirement(self._workload).peak_bytes
        else:
            tokens = context
            need = self.search.requirement(self._workload.prompt_only(context)).peak_bytes
        limit = wired_limit(need, self.device).nbytes
        if limit == need:
            text = f"{self._size(need)} keeps all of {tokens} tokens resident"
            return Advice("keep", limit, text + self._caveat(context, ", "))
        text = (
            f"{self._size(limit)}, the {self.device.budget}, is the most"
            f" MLX accepts; {tokens} tokens need {self._size(need)}"
        )
        return Advice("keep", limit, text)

    def system_limit(self) -> Advice:
        """The sysctl that makes room for the workload, where only the working set is too small."""
        if self.device.backend != "metal" or self.device.budget != WORKING_SET:
            return Advice("not_applicable", None, "iogpu.wired_limit_mb is a setting of macOS")
        need = self._sized.requirement(self._workload)
        larger = wired_limit(need.peak_bytes, self.device)
        exceeded = judge(need, self.device)[1]
        if "working_set" not in exceeded:
            return Advice("keep", 0, f"the default, {self._size(self.device.working_set_bytes)}")
        if larger.sysctl_mebibytes is None or exceeded != ("working_set",):
            why = (
                f"{self._size(need.peak_bytes)} do not fit this Mac with any value of it that"
                f" leaves the system {self._size(LEAST_LEFT_BYTES)}"
            )
            return Advice("impossible", None, why)
        why = (
            f"sudo sysctl iogpu.wired_limit_mb={larger.sysctl_mebibytes} would make room for the"
            f" {self._workload.total_tokens} tokens asked for and leave the system"
            f" {self._size(larger.left_for_system_bytes)}; {RISK}"
        )
        return Advice("change", larger.sysctl_mebibytes, why)

    def _dearer_steps(self) -> str:
        dearer = self.joint.dearer_steps()
        if not dearer:
            return ""
        return f"; a step of {' or '.join(map(str, dearer))} takes more memory, not less"

    def _obstacle(self, tokens: int) -> str:
        """Why a prompt of ``tokens`` is too long."""
        longer = self._workload.prompt_only(tokens)
        try:
            need = self.search.requirement(longer)
        except UnsupportedError as error:
            return f"{tokens} cannot be run: {error}"
        by = f" {self.search.by}" if self.search.caveat(longer) else ""
        exceeded = judge(need, self.device)[1]
        if need.budget and OF_RUNTIME.intersection(exceeded):
            for_cache = need.budget.for_cache
            return (
                f"{tokens} would need{by} {'a cache of ' if for_cache else ''}"
                f"{self._size(need.budgeted_bytes)}, above"
                f" {self._size(need.budget.of_device(self.device))}, what {self._sized.runtime}"
                f" gives {'its cache' if for_cache else 'itself'}"
            )
        if "memory" in exceeded:
            return (
                f"{tokens} would need {self._size(need.shared_bytes)} on GPU and host together,"
                f" above {self._size(self.device.memory_bytes)}, their memory"
            )
        if "host_memory" in exceeded and need.host:
            return (
                f"{tokens} would need {self._size(need.host.nbytes)} on the host, above its"
                f" {self._size(need.host.memory_bytes or 0)}"
            )
        largest = self.device.max_buffer_bytes
        if largest is not None and need.largest_buffer_bytes > largest:
            return (
                f"{tokens} would need{by} one allocation of"
                f" {self._size(need.largest_buffer_bytes)}, above {self._size(largest)}, the"
                " largest the device gives"
            )
        limit_bytes = self.device.working_set_bytes
        needed = f"{tokens} would need {self._size(need.peak_bytes)}{by}"
        comfortable = comfortable_bytes(limit_bytes)
        if need.peak_bytes > comfortable:
            budget = f"nine tenths of the {self.device.budget}"
            return f"{needed}, above {self._size(comfortable)}, {budget}"
        return (
            f"{needed}, with its stated error up to"
            f" {self._size(need.peak_bytes + need.error_bytes)}, above the {self.device.budget},"
            f" {self._size(limit_bytes)}"
        )

    def _caveat(self, context: int | None, separator: str) -> str:
        """How a context was found that no trace confirmed."""
        if not context:
            return ""
        caveat = self.search.caveat(self._workload.prompt_only(context))
        return f"{separator}{caveat}" if caveat else ""

    def _size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.units)
