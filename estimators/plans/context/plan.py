"""``memfit plan context``: which contexts fit, for how many requests, under a runtime's rules."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import ceil_div, format_bytes, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.context import (
    AutoContext,
    Ceilings,
    ContextFit,
    ContextPlan,
    Distribution,
    HostVisible,
    LargestContext,
    MatrixCell,
    TrafficPlan,
)
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.result import both_units
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile, plain_profile
from memfit.estimators.runtimes.facets import MlxLmPrograms, OwnContext
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import Budget, judge, recommended_bytes
from memfit.estimators.sizing.estimate import (
    assumption_notes,
    device_summary,
    model_summary,
    workload_notes,
)
from memfit.estimators.sizing.image_advice import image_advice
from memfit.estimators.sizing.run_limits import (
    ending_notes,
    notes_beyond,
    prompt_verdict,
    run_limits,
    tightened,
)
from memfit.estimators.sizing.search import (
    UNBOUNDED_CONTEXT,
    context_lengths,
    first_fitting,
    fits_comfortably,
    longest_context,
)
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.sizing.step_schedule import step_schedule

CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
REQUESTS = (1, 2, 4, 8, 16)
MAX_REQUESTS = 4096
PERCENTILES = (50, 90, 95, 99)


class ContextQuestion(Struct, frozen=True, kw_only=True):
    """What a plan answers, in addition to the workload."""

    contexts: Sequence[int] = ()
    """Tokens of each request, the rows of the matrix; empty: the usual ones that can be run."""
    requests: Sequence[int] = REQUESTS
    """Requests at once, the columns of the matrix."""
    ceiling: int | None = None
    """No longer context is planned, in tokens."""
    backend_cap: int | None = None
    """The longest context that the backend allows, in tokens."""
    traffic: Sequence[TraceRequest] = ()


def plan_context(
    sized: SizedModel,
    workload: Workload,
    question: ContextQuestion | None = None,
) -> ContextPlan:
    """Return the contexts that fit under the model's runtime.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    return _ContextPlan(sized, workload, question or ContextQuestion()).answer()


def percentile(ordered: list[int], percent: int) -> int:
    """Return the nearest-rank percentile of sorted counts.

    >>> percentile([1, 2, 3, 4], 50), percentile([1, 2, 3, 4], 99)
    (2, 4)
    """
    return ordered[max(0, ceil_div(percent * len(ordered), 100) - 1)]


def distribution(tokens: Iterable[int]) -> Distribution:
    """Return the percentiles of at least one count."""
    ordered = sorted(tokens)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    mean = ceil_div(sum(ordered), len(ordered))
    return Distribution(mean, p50, p90, p95, p99, ordered[-1])


class _ContextPlan(Struct, frozen=True):
    sized: SizedModel
    workload: Workload
    question: ContextQuestion

    def answer(self) -> ContextPlan:
        sized, workload, device = self.sized, self.workload, self.sized.device
        runtime_model, host = sized.runtime_model, sized.requirement(workload).host
        if host and host.is_undecided:
            needed = format_bytes(host.nbytes)
            raise UnsupportedError(
                f"the host has to hold {needed}, and its memory is not known: give --host-memory"
            )
        figures, own = sized.figures_for(workload), runtime_model.facet(OwnContext)
        profile = (own.memory_profile if own else plain_profile)(workload, figures)
        allocation = runtime_model.statements(workload, figures).allocation
        ceilings = self._ceilings()
        limits, lengths = run_limits(sized, workload), self._lengths(ceilings)
        longest = longest_context(sized, workload, ceilings.effective) if device else None
        device_local = self._largest(ceilings, device, profile) if device else None
        is_discrete = device is not None and device.has_host
        return ContextPlan(
            model=model_summary(sized),
            runtime=runtime_summary(runtime_model.runtime),
            device=device_summary(device) if device else None,
            workload=workload,
            margin_bytes=sized.margin_bytes,
            weights_bytes=sized.resident_bytes,
            profile=profile,
            ceilings=ceilings,
            device_local=device_local,
            unified=self._largest(ceilings, device) if device and not is_discrete else None,
            host=HostVisible(
                profile.runtime_host_visible_bytes(device_local.tokens), device.host_memory_bytes
            )
            if device and device_local and is_discrete
            else None,
            automatic=self._automatic(ceilings, device) if device else None,
            longest_context=longest,
            recommended_bytes=recommended_bytes(self._budget, device) if device else None,
            fit=self._fit(device) if device else None,
            verdict=self._verdict(workload),
            matrix=tuple(self._matrix(ceilings)),
            largest_batch=self._at_once(workload.prompt_tokens) if device else None,
            schedule=step_schedule(sized, workload, ceilings.effective),
            traffic=self._traffic(longest) if self.question.traffic else None,
            assumptions=both_units(tuple(allocation)),
            notes=(
                *both_units(tuple(self._notes())),
                *ending_notes(limits),
                *notes_beyond(sized, workload, max(longest or 0, *lengths, 0)),
                *self._notes_on_matrix(ceilings),
            ),
            limits=limits,
            longest_verdict=prompt_verdict(sized, workload, longest or 0),
            images=image_advice(sized, workload) or UNSET,
        )

    @property
    def _budget(self) -> Budget:
        return self.sized.runtime_model.runtime.budget

    def _ceilings(self) -> Ceilings:
        model, question = self.sized.model.max_context, self.question
        requested = question.ceiling or self.sized.runtime_model.runtime.max_context
        known = [value for value in (model, requested, question.backend_cap) if value is not None]
        most = min(known, default=UNBOUNDED_CONTEXT)
        return Ceilings(model, requested, question.backend_cap, most)

    def _largest(
        self, ceilings: Ceilings, device: Device, profile: RuntimeMemoryProfile | None = None
    ) -> LargestContext:
        """The largest context in all of the working set, with the margin free.

        With a profile, its part in host memory is not counted.
        """
        budget = device.working_set_bytes

        def fits(tokens: int) -> bool:
            need = self.sized.requirement(self.workload.prompt_only(tokens)).peak_bytes
            return need - (profile.runtime_host_visible_bytes(tokens) if profile else 0) <= budget

        tokens = first_fitting(range(ceilings.effective, 0, -1), fits, monotone=True)
        return LargestContext(budget, tokens or 0)

    def _automatic(self, ceilings: Ceilings, device: Device) -> AutoContext:
        """The runtime's own context and the right one; the longest is by the device alone."""

        def fits(tokens: int) -> bool:
            need = self.sized.requirement(self.workload.prompt_only(tokens))
            of_device = need if self._budget.is_taken else replace(need, budget=None)
            return judge(of_device, device)[0] == "fits"

        most = ceilings.effective
        longest = first_fitting(context_lengths(most), fits, monotone=True) or 0
        own = self.sized.runtime_model.facet(OwnContext)
        if own is None:
            return AutoContext(self._budget.of_device(device), None, longest)
        return own.automatic_context(device, self.workload, most=most, longest=longest)

    def _fit(self, device: Device) -> ContextFit:
        need = self.sized.requirement(self.workload).peak_bytes
        headroom = device.working_set_bytes - need
        return ContextFit(need, device.working_set_bytes, device.memory_bytes, headroom)

    def _lengths(self, ceilings: Ceilings) -> Sequence[int]:
        """The tokens of each row of the matrix."""
        least = self.workload.least_prompt_tokens
        usual = [tokens for tokens in CONTEXTS if least <= tokens <= ceilings.effective]
        return self.question.contexts or usual

    def _matrix(self, ceilings: Ceilings) -> Iterator[MatrixCell]:
        for tokens in self._lengths(ceilings):
            for requests in self.question.requests:
                workload = replace(
                    self.workload.prompt_only(tokens), batch=requests, decode_batch=requests
                )
                try:
                    need = self.sized.requirement(workload)
                except UnsupportedError as error:
                    yield MatrixCell(tokens, requests, None, "unknown", str(error))
                    continue
                yield MatrixCell(tokens, requests, need.peak_bytes, self._verdict(workload))

    def _verdict(self, workload: Workload) -> Verdict:
        verdict, _ = judge(self.sized.requirement(workload), self.sized.device)
        return tightened(verdict, run_limits(self.sized, workload))

    def _notes_on_matrix(self, ceilings: Ceilings) -> Iterator[Note]:
        for tokens in self.question.contexts:
            if tokens > ceilings.effective:
                text = f"{tokens} tokens are above {ceilings.effective}, the most that can be run"
                yield Note("warning", "above-ceiling", text)
        if (
            self.sized.runtime_model.facet(MlxLmPrograms)
            and max(self.question.requests, default=1) > 1
        ):
            text = (
                "requests at once are one batch that begins and ends together; mlx_lm.server lets"
                " them come and go and keeps caches: memfit plan server --clients bounds that"
            )
            yield Note("info", "requests-in-one-batch", text)

    def _at_once(self, tokens: int) -> int:
        """The most requests of ``tokens`` each that fit at once; 0 where not even one does."""

        def fits(count: int) -> bool:
            prompts = replace(self.workload.prompt_only(tokens), batch=count, decode_batch=count)
            return fits_comfortably(self.sized, prompts)

        return first_fitting(range(MAX_REQUESTS, 0, -1), fits, monotone=True) or 0

    def _traffic(self, longest: int | None) -> TrafficPlan:
        requests = self.question.traffic
        totals = sorted(request.total_tokens for request in requests)
        served = round_up(percentile(totals, 99), self.sized.runtime_model.runtime.kv_step)
        whole = distribution(totals)
        has_device = self.sized.device is not None
        return TrafficPlan(
            requests=len(requests),
            prompt=distribution(request.prompt_tokens for request in requests),
            completion=distribution(request.completion_tokens for request in requests),
            total=whole,
            longest_context=longest,
            fitting=sum(total <= (longest or 0) for total in totals) if has_device else None,
            context_for_99=served,
            at_once_for_99=self._at_once(served) if has_device else None,
            at_once_of_mean=self._at_once(whole.mean) if has_device else None,
        )

    def _notes(self) -> Iterator[Note]:
        sized, workload = self.sized, self.workload
        yield from assumption_notes(sized)
        yield from sized.footprint.notes
        yield from workload_notes(sized, workload)
        figures, runtime_model = sized.figures_for(workload), sized.runtime_model
        yield from runtime_model.statements(workload, figures).notes
        if own := runtime_model.facet(OwnContext):
            yield from own.context_notes(workload, figures)
