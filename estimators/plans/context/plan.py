"""``memfit plan context``: which contexts fit, for how many requests, under a runtime's rules."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.records import record
from memfit.estimators.base.units import Units, format_bytes, round_up
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.plans.context.traffic import Request, distribution, percentile
from memfit.estimators.results.context import (
    SCHEMA,
    Ceilings,
    ContextFit,
    LargestContext,
    MatrixCell,
    TrafficPlan,
)
from memfit.estimators.results.estimate import (
    DeviceSummary,
    ModelSummary,
    Note,
    RuntimeSummary,
    Verdict,
    WorkloadSummary,
)
from memfit.estimators.runtimes.auto_context import Automatic, foundry_context, pool_context
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.foundry import FoundrySettings
from memfit.estimators.runtimes.memory_plan import (
    RuntimeMemoryProfile,
    auto_context_tokens_for_device_budget,
    fitting_context_tokens,
    memory_status,
    model_config,
    profile,
)
from memfit.estimators.runtimes.registry import (
    AGENT_MEMORY,
    FOUNDRY,
    LLAMA_CPP,
    VLLM,
    ZINC,
    Runtime,
)
from memfit.estimators.runtimes.ruled import runtime_assumptions, runtime_notes
from memfit.estimators.runtimes.token_cost import needed_bytes
from memfit.estimators.sizing.estimate import device_summary, model_summary, workload_notes
from memfit.estimators.sizing.search import (
    first_fitting,
    fits_comfortably,
    longest_context,
    longest_prompt,
)
from memfit.estimators.sizing.sized_model import SizedModel

CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
REQUESTS = (1, 2, 4, 8, 16)
MAX_REQUESTS = 4096


@record(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """The answer of ``memfit plan context``; what depends on a device is None without one."""

    memfit_version: str
    model: ModelSummary
    runtime: RuntimeSummary
    device: DeviceSummary | None
    workload: WorkloadSummary
    margin_bytes: int
    weights_bytes: int
    profile: RuntimeMemoryProfile
    ceilings: Ceilings
    device_local: LargestContext | None
    """Within the working set, without what lies in host memory."""
    unified: LargestContext | None
    """Within the working set, everything included."""
    automatic: Automatic | None
    longest_context: int | None
    """Within nine tenths of the working set, in steps of 256; None also when nothing fits."""
    fit: ContextFit | None
    verdict: Verdict
    matrix: tuple[MatrixCell, ...]
    largest_batch: int | None
    """The most requests as long as the workload's prompt that fit at once."""
    traffic: TrafficPlan | None
    assumptions: tuple[str, ...]
    notes: tuple[Note, ...]
    schema: str = SCHEMA


@record(frozen=True, slots=True, kw_only=True)
class ContextQuestion:
    """What a plan answers, in addition to the workload."""

    contexts: Sequence[int] = CONTEXTS
    """Tokens of each request, the rows of the matrix."""
    requests: Sequence[int] = REQUESTS
    """Requests at once, the columns of the matrix."""
    ceiling: int | None = None
    """No longer context is planned, in tokens."""
    backend_cap: int | None = None
    """The longest context that the backend allows, in tokens."""
    traffic: Sequence[Request] = ()


def plan_context(
    sized: SizedModel,
    workload: Workload,
    rules: Runtime,
    asked: ContextQuestion | None = None,
    *,
    settings: FoundrySettings | None = None,
    units: Units = Units.GB,
) -> ContextPlan:
    """Return the plan; ``sized`` must be sized for the runtime of ``rules``.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    plan = _Plan(
        sized, workload, rules, asked or ContextQuestion(), settings or FoundrySettings(), units
    )
    return plan.answer()


@record(frozen=True, slots=True)
class _Plan:
    sized: SizedModel
    workload: Workload
    rules: Runtime
    asked: ContextQuestion
    settings: FoundrySettings
    units: Units

    def answer(self) -> ContextPlan:
        sized, workload, device = self.sized, self.workload, self.sized.device
        ceilings = self._ceilings()
        longest = longest_context(sized, workload, ceilings.effective) if device else None
        return ContextPlan(
            memfit_version=__version__,
            model=model_summary(sized),
            runtime=RuntimeSummary(self.rules.name, self.rules.version),
            device=device_summary(device) if device else None,
            workload=WorkloadSummary(**asdict(workload)),
            margin_bytes=sized.margin_bytes,
            weights_bytes=sized.resident_bytes,
            profile=self._profile(),
            ceilings=ceilings,
            device_local=self._largest(ceilings, device, unified=False),
            unified=self._largest(ceilings, device, unified=True),
            automatic=self._automatic(ceilings, device, longest) if device else None,
            longest_context=longest,
            fit=self._fit(device) if device else None,
            verdict=judge(sized.requirement(workload), device)[0],
            matrix=tuple(self._matrix(ceilings)),
            largest_batch=self._at_once(workload.prompt_tokens) if device else None,
            traffic=self._traffic(longest) if self.asked.traffic else None,
            assumptions=tuple(runtime_assumptions(sized.engine, sized.checkpoint)),
            notes=tuple(self._notes()),
        )

    def _ceilings(self) -> Ceilings:
        model, asked = self.sized.model.max_context, self.asked
        requested = asked.ceiling or self.settings.max_context
        known = [value for value in (model, requested, asked.backend_cap) if value is not None]
        most = longest_prompt(min(known, default=None), self.workload)
        return Ceilings(model, requested, asked.backend_cap, most)

    def _profile(self) -> RuntimeMemoryProfile:
        """Exact for zinc, whose memory is linear; of the others as it is at the workload."""
        if self.rules.name == ZINC:
            return profile(model_config(self.sized.model))
        figures = self.sized.figures_for(self.workload)
        fixed = figures.ssm_bytes + figures.moment.workspace_bytes
        token = figures.kv.bytes_per_token * self.workload.batch
        kv_shared, work_shared = self.settings.kv_cache_shared, self.settings.intermediates_shared
        return RuntimeMemoryProfile(
            fixed_device_local_bytes=figures.ssm_bytes if work_shared else fixed,
            fixed_host_visible_bytes=figures.moment.workspace_bytes if work_shared else 0,
            device_local_bytes_per_token=0 if kv_shared else token,
            host_visible_bytes_per_token=token if kv_shared else 0,
            gpu_ssm_bytes=figures.ssm_bytes,
        )

    def _largest(
        self, ceilings: Ceilings, device: Device | None, *, unified: bool
    ) -> LargestContext | None:
        """The largest context in all of the working set, margin kept free."""
        if device is None:
            return None
        budget, memory = device.working_set_bytes, self._profile()
        if self.rules.name == ZINC:
            ask = (
                memory.max_context_tokens_for_unified_budget
                if unified
                else memory.max_context_tokens_for_device_local_budget
            )
            kept = self.sized.resident_bytes + self.sized.margin_bytes
            return LargestContext(budget, ask(kept, budget, ceilings.effective))
        apart = memory.fixed_host_visible_bytes if not unified else 0
        apart_per_token = memory.host_visible_bytes_per_token if not unified else 0

        def fits(tokens: int) -> bool:
            need = self.sized.requirement(self.workload.prompt_only(tokens)).peak_bytes
            return need - apart - apart_per_token * tokens <= budget

        tokens = first_fitting(range(ceilings.effective, 0, -1), fits, monotone=True)
        return LargestContext(budget, tokens or 0)

    def _automatic(self, ceilings: Ceilings, device: Device, longest: int | None) -> Automatic:
        """The runtime's own context, and the right one: never beyond what the device holds."""
        found = self._by_budget(ceilings, device, longest or 0)
        if found.right_tokens <= (longest or 0) or self.rules.name == ZINC:
            return found
        reason = f"with weights and workspace the device holds {longest or 0} tokens"
        reason = "; ".join(filter(None, (found.reason, reason)))
        return replace(found, right_tokens=longest or 0, reason=reason)

    def _by_budget(self, ceilings: Ceilings, device: Device, longest: int) -> Automatic:
        rules, sized, most = self.rules, self.sized, ceilings.effective
        budget, weights = rules.budget.of_device(device), sized.resident_bytes
        token = sized.figures_for(self.workload).kv.bytes_per_token
        if rules.name == ZINC:
            return self._zinc(device, most)
        if rules.name == FOUNDRY:
            return foundry_context(budget, token, most)
        if rules.name == AGENT_MEMORY:
            return pool_context(budget, token, most, rules.kv_step)
        if rules.name == VLLM:
            figures = sized.figures_for(self.workload)
            left = budget - weights - figures.moment.workspace_bytes - figures.ssm_bytes
            return pool_context(left, token, most, rules.kv_step)
        its_own = most if rules.name == LLAMA_CPP else None
        reason = ""
        if its_own is not None and its_own > longest:
            reason = f"llama.cpp takes the model's own {its_own} tokens unless told otherwise"
        return Automatic(budget, its_own, longest, reason)

    def _zinc(self, device: Device, most: int) -> Automatic:
        memory, weights = profile(model_config(self.sized.model)), self.sized.resident_bytes
        whole = device.working_set_bytes
        its_own = auto_context_tokens_for_device_budget(memory, weights, whole, most)
        right = fitting_context_tokens(memory, weights, whole, most)
        reason = ""
        if its_own > right:
            need = memory.total_device_local_bytes(weights, its_own)
            reason = (
                f"zinc's floor of {its_own} tokens needs {need} bytes on the device,"
                f" its budget is {self.rules.budget.of_device(device)}"
            )
        return Automatic(self.rules.budget.of_device(device), its_own, right, reason)

    def _fit(self, device: Device) -> ContextFit:
        need = self.sized.requirement(self.workload).peak_bytes
        status = memory_status(need, device.working_set_bytes, device.memory_bytes)
        headroom = device.working_set_bytes - need
        return ContextFit(status, need, device.working_set_bytes, device.memory_bytes, headroom)

    def _matrix(self, ceilings: Ceilings) -> Iterator[MatrixCell]:
        for tokens in self.asked.contexts:
            if tokens > ceilings.effective:
                continue
            for requests in self.asked.requests:
                workload = replace(self.workload.prompt_only(tokens), batch=requests)
                try:
                    need = self.sized.requirement(workload)
                except UnsupportedError:
                    yield MatrixCell(tokens, requests, None, "unknown")
                    continue
                verdict, _ = judge(need, self.sized.device)
                yield MatrixCell(tokens, requests, need.peak_bytes, verdict)

    def _at_once(self, tokens: int) -> int:
        """The most requests of ``tokens`` each that fit at once; 0 where not even one does."""

        def fits(count: int) -> bool:
            prompts = replace(self.workload.prompt_only(tokens), batch=count)
            return fits_comfortably(self.sized, prompts)

        return first_fitting(range(MAX_REQUESTS, 0, -1), fits, monotone=True) or 0

    def _traffic(self, longest: int | None) -> TrafficPlan:
        requests = self.asked.traffic
        totals = sorted(request.total for request in requests)
        served = round_up(percentile(totals, 99), self.rules.kv_step)
        whole = distribution(totals)
        has_device = self.sized.device is not None
        return TrafficPlan(
            requests=len(requests),
            prompt=distribution(request.prompt for request in requests),
            completion=distribution(request.completion for request in requests),
            total=whole,
            longest_context=longest,
            fitting=sum(total <= (longest or 0) for total in totals) if has_device else None,
            context_for_99=served,
            at_once_for_99=self._at_once(served) if has_device else None,
            at_once_of_mean=self._at_once(whole.mean) if has_device else None,
        )

    def _notes(self) -> Iterator[Note]:
        sized, workload = self.sized, self.workload
        yield from sized.footprint.notes
        yield from workload_notes(sized, workload)
        yield from runtime_notes(sized.engine, sized.model, sized.footprint, workload, self.units)
        most = self.settings.max_context
        if most is not None and workload.total_tokens > most:
            text = f"METALLIC_MAX_CONTEXT_LEN: Foundry stops at {most} tokens"
            yield Note("warning", "beyond-context", text)
        if self.rules.name == ZINC:
            right = needed_bytes(
                sized.model, self.rules, self.workload.prompt_only(workload.total_tokens)
            )
            token = right // workload.total_tokens // workload.batch
            charged = sized.figures_for(workload).kv.bytes_per_token - 4
            if token != charged:
                text = (
                    f"a token takes {format_bytes(charged, self.units)} as zinc charges it,"
                    f" {format_bytes(token, self.units)} in the layers that attend"
                )
                yield Note("warning", "runtime-fault", text)
