"""mlx-lm by trace: its own class is run lazily in place of the formulas."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from msgspec import field
from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import context_limit
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Workload
from memfit.estimators.machine.device import ANY_MAC, Backend, Device
from memfit.estimators.mlx.call_plan import PREFILL
from memfit.estimators.mlx.kv_cache import KVCache, kv_cache
from memfit.estimators.mlx.versions import MlxVersions, parse_version
from memfit.estimators.results.estimate import Note, RunCall
from memfit.estimators.results.terms import Basis, PeakMoment, Phase
from memfit.estimators.runtimes.by_class import (
    ModelTrace,
    TracedWorkspace,
    moment_of,
    peak_lines,
    trace_target,
    weights_by_trace,
)
from memfit.estimators.runtimes.interface import (
    DraftFigures,
    Figure,
    MemoryFigures,
    RuntimeModel,
    Subject,
)
from memfit.estimators.runtimes.mlx_lm import MlxLm
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import (
    TRACE_ERROR_PERCENT,
    Formula,
    Interpolated,
    Source,
    Traced,
)
from memfit.estimators.weights.conversion import conversion_type
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.weights.loading import Conversion

# The trace is imported where it runs: a sixth of a formula's answer would be spent on it.
if TYPE_CHECKING:
    from memfit.estimators.trace.graph_format import Call, Trace
    from memfit.estimators.trace.peak import RunPeak, Start
    from memfit.estimators.trace.traced_model import TracedModel, TracedShapes

MAX_SPANS = 240
# Those of a request, and of a few other prefill steps.
_STARTS = 4


class ClassTrace(ModelTrace, frozen=True, eq=False):
    """mlx-lm's class of a model."""

    phases: frozenset[CallPhase] = ALL_PHASES
    """Of these a run's calls are traced, and the first where another takes on what it leaves."""
    _runs: dict[tuple[Workload, Any, MlxVersions, frozenset[CallPhase]], "TracedRun"] = field(
        default_factory=dict
    )
    """By workload, `Device.gpu`, versions and ``phases``."""
    _starts: dict[tuple[Any, MlxVersions], "list[tuple[Call, Start | None]]"] = field(
        default_factory=dict
    )
    """The first chunks of the last runs, by `Device.gpu` and versions."""

    def run(self, workload: Workload, device: Device | None, versions: MlxVersions) -> "TracedRun":
        """Return what the class holds when a workload ends, and its largest moment on the way."""
        from memfit.estimators.trace.isolation import not_collecting

        machine = device or ANY_MAC
        # A prompt of one chunk is the same with every larger step.
        step = min(workload.prefill_step, workload.prompt_tokens)
        workload = replace(workload, prefill_step=step)
        key = workload, machine.gpu, versions, self.phases
        if key not in self._runs:
            with not_collecting():
                self._runs[key] = run = self._followed(workload, machine, versions)
            # Where few calls cannot be recorded, all cannot.
            if run.peak is None:
                whole = (*key[:-1], ALL_PHASES)
                self._runs[whole] = run
        return self._runs[key]

    def moment(
        self, workload: Workload, device: Device | None, versions: MlxVersions
    ) -> PeakMoment | None:
        traced = self.run(workload, device, versions).peak
        return moment_of(traced) if traced else None

    def _followed(self, workload: Workload, machine: Device, versions: MlxVersions) -> "TracedRun":
        from memfit.estimators.trace.peak import peak
        from memfit.estimators.trace.recording import GraphError

        built = self.built(machine.backend)
        try:
            target = trace_target(machine, versions)
            trace, shapes = built.record(workload, target, phases=self.phases)
        except GraphError as error:
            return TracedRun(built.shapes(workload), None, str(error))
        start = self._start(trace, machine, versions)
        kept, largest = shapes.kv_bytes + shapes.ssm_bytes, shapes.largest_bytes
        return TracedRun(shapes, peak(trace, machine, start, kept_bytes=kept, largest_kept=largest))

    def _start(self, trace: "Trace", machine: Device, versions: MlxVersions) -> "Start | None":
        """Return the first call of a run, followed once for all that begin with it."""
        from memfit.estimators.trace.peak import followed_start

        known = self._starts.setdefault((machine.gpu, versions), [])
        for call, start in known:
            if call is trace.calls[0]:
                return start
        start = followed_start(trace, machine)
        known.append((trace.calls[0], start))
        del known[:-_STARTS]
        return start

    def drafted(
        self,
        draft: "ClassTrace",
        workload: Workload,
        tokens: int,
        device: Device,
        versions: MlxVersions,
    ) -> "RunPeak[CallPhase]":
        """Return the highest moment with a draft model that proposes ``tokens`` in each step.

        Raises:
            GraphError: when the graphs cannot be recorded.
        """
        from memfit.estimators.trace.isolation import not_collecting
        from memfit.estimators.trace.peak import speculative_peak

        target, other = self.built(device.backend), draft.built(device.backend)
        machine = trace_target(device, versions)
        with not_collecting():
            return speculative_peak(target, other, workload, tokens, machine=machine, device=device)

    def shapes(self, workload: Workload) -> "TracedShapes":
        """Return the bytes that the class holds when a workload ends."""
        built: TracedModel = next(iter(self._built.values()), None) or self.built(ANY_MAC.backend)
        return built.shapes(workload)

    def _build(self, backend: Backend) -> "TracedModel":
        from memfit.estimators.trace.traced_model import TracedModel

        return TracedModel(
            self.checkpoint.config,
            backend,
            name=self.checkpoint.config_name,
            dtype=self.dtype,
            tensors=self.checkpoint.tensors,
            quantize=self.quantize,
            adapter=self.adapter,
            rank=self.rank,
        )

    def of_rank(self, rank: Rank) -> "ClassTrace":
        """Return the trace of one rank's part."""
        return self._made(self.quantize, rank)

    def converted(self, quantize: Quantization) -> "ClassTrace":
        return self._made(quantize, self.rank)

    def _made(self, quantize: Quantization | None, rank: Rank | None) -> "ClassTrace":
        # Not by `replace`, which would share what was built.
        checkpoint = self.checkpoint
        dtype = (conversion_type(checkpoint.config) if quantize else None) or self.dtype
        return ClassTrace(checkpoint, quantize, dtype, rank, self.adapter)

    def weights(self, device: Device | None) -> Mapping[str, int]:
        """Return the bytes of each parameter by path, without those of the adapter."""
        weights = super().weights(device)
        added = {tensor.name for tensor in self.adapter.tensors} if self.adapter else set()
        return {path: nbytes for path, nbytes in weights.items() if path not in added}

    def versions(self) -> str:
        """Return the versions of what was run."""
        from memfit.estimators.trace.libraries import versions

        return ", ".join(f"{name} {version}" for name, version in versions().items())

    def description(self, device: Device | None) -> Model:
        from memfit.estimators.trace.declared_format import unquantised
        from memfit.estimators.trace.traced_model import TracedModel

        config, name = self.checkpoint.config, self.checkpoint.config_name
        backend = (device or ANY_MAC).backend
        plain = TracedModel(
            unquantised(config), backend, name=name, dtype=self.dtype, rank=self.rank
        )
        model = plain.describe(self.built(backend).first_call())
        return replace(model, max_context=context_limit(config_fields(config, name)))


class MlxLmTrace(MlxLm, frozen=True):
    """mlx-lm by trace: shapes from its class, the peak from its graph."""

    trace: ClassTrace

    class_trace: ClassVar[type[ModelTrace]] = ClassTrace
    _workspace_basis: ClassVar[tuple[Basis, int]] = ("traced", TRACE_ERROR_PERCENT)

    @property
    def source(self) -> Source:
        return Traced()

    @property
    def _is_described(self) -> bool:
        """Whether formulas know the model too: they find what needs many workloads."""
        return isinstance(self.subject.source, Formula)

    @classmethod
    def of_class(cls, runtime: Runtime, subject: Subject, trace: ClassTrace) -> "MlxLmTrace":
        """Return a model that its class describes."""
        return cls(runtime, subject, trace)

    def _run(self, workload: Workload) -> "TracedRun":
        """The run of a workload; of a batch in groups that of a group alone."""
        if self.is_grouped(workload):
            workload = replace(workload, batch=workload.prefill_batch)
        return self.trace.run(workload, self.subject.device, self.runtime.versions)

    def together(self, workload: Workload) -> MemoryFigures:
        """Return what sequences take that are prefilled and decoded as one batch."""
        # The formula says in words which caches cannot be quantised; a class just fails on them.
        per_token = kv_cache(self.subject.model, workload).bytes_per_token
        kv, states = _caches(self._run(workload).shapes, per_token)
        moment = self.trace.moment(workload, self.subject.device, self.runtime.versions)
        if moment is None:
            moment = MlxLm.together(self, workload).moment
        else:
            moment = moment.raised(self.subject.footprint.sliced_bytes)
        return MemoryFigures(kv, states, moment.with_load(self.load_bytes()))

    def caches(self, workload: Workload) -> tuple[KVCache, int]:
        """Return keys and values, and the bytes of states, of sequences that decode together."""
        per_token = kv_cache(self.subject.model, workload).bytes_per_token
        return _caches(self.trace.shapes(workload), per_token)

    def load_bytes(self) -> int:
        """Return the peak of the load; by formula where its graph cannot be recorded.

        Of a rank that reads whole arrays the trace has one order of reads and copies, the formula
        the largest of several.
        """
        traced = self.trace.load_bytes(self.subject.device or ANY_MAC, self.runtime.versions)
        return super().load_bytes() if traced is None else max(traced, self._cut_load.expected)

    def parallel(self, requested: Parallel | None) -> Parallel:
        if self._is_described:
            return super().parallel(requested)
        built: TracedModel = self.trace.built(self.subject.backend)
        return built.parallel(requested)

    def for_rank(self, rank: Rank) -> "MlxLmTrace":
        """Return the part of one rank, as the class itself cuts it."""
        subject, trace = self.subject, self.trace.of_rank(rank)
        if self._is_described:
            subject = MlxLm.for_rank(self, rank).subject
            footprint = traced_weights(trace, subject.footprint, subject.device)
            return replace(self, subject=replace(subject, footprint=footprint), trace=trace)
        model = trace.description(subject.device)
        footprint = weights_by_trace(trace, model, subject.footprint.plan, subject.device)
        subject = replace(
            subject,
            model=model,
            footprint=replace(footprint, notes=subject.footprint.notes),
            source=Interpolated(TracedWorkspace(trace, subject.model.max_context)),
            rank=rank,
        )
        return replace(self, subject=subject, trace=trace)

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return a figure's basis; a workspace without a trace rests on the formula."""
        if figure == "weights":
            return MlxLm.basis(self, figure, workload)
        if figure == "cache":
            return "traced", 0
        if self.subject.backend != "cuda" and self._run(workload).peak is None:
            return MlxLm._workspace_basis if self._is_described else ("bound", 0)
        return MlxLm.basis(self, figure, workload)

    def drafted(self, workload: Workload, draft: RuntimeModel, tokens: int) -> DraftFigures:
        """Return what both classes take in mlx-lm's loop above this one; by formula without graphs.

        Raises:
            UnsupportedError: when mlx-lm rejects or ignores what is asked.
        """
        if not isinstance(draft, MlxLmTrace):
            return super().drafted(workload, draft, tokens)
        from memfit.estimators.runtimes.drafting import require_drafting
        from memfit.estimators.trace.recording import GraphError

        require_drafting(self.subject.model, workload)
        device, versions = self.subject.device or ANY_MAC, self.runtime.versions
        try:
            peak = self.trace.drafted(draft.trace, workload, tokens, device, versions)
        except GraphError:
            return super().drafted(workload, draft, tokens)
        phase: Phase = "prefill" if peak.top.part in PREFILL else "decode"
        workspace = peak.top.nbytes - dict(peak.alive).get("caches", 0)
        lines = "".join(peak_lines(peak))
        both = DraftFigures(peak.nbytes, "traced", phase, lines, workspace_bytes=workspace)
        return self._above_alone(both, draft, self.figures(workload))

    def formula(self) -> MlxLm:
        """Return mlx-lm by formula, with a workspace between traced prompts where none has it."""
        # The load does not depend on the workload, so it stays by trace.
        cut = max(self.resident_bytes(), self._cut_load.expected)
        made = (Conversion(0, max(0, self.load_bytes() - cut)),)
        footprint = replace(self.subject.footprint, conversions=made, first=())
        return MlxLm(self.runtime, replace(self.subject, footprint=footprint))

    def for_phases(self, phases: frozenset[CallPhase]) -> "MlxLmTrace":
        """Return the same for the calls of these phases alone."""
        return replace(self, trace=replace(self.trace, phases=phases))

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        """Yield the versions of what was run, and what an estimate assumes."""
        yield f"traced with {self.trace.versions()}"
        yield from super()._assumptions(workload)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield where formulas differ, and what the workspace rests on where it is no trace."""
        yield from super()._notes(workload, figures)
        yield from self._other_classes()
        kv, states = MlxLm.caches(self, replace(workload, batch=self.decoding_rows(workload)))
        for name, traced, derived in (
            ("KV cache", figures.kv.nbytes, kv.nbytes),
            ("recurrent state", figures.ssm_bytes, states),
        ):
            # A few caches of classes without a formula have a bound (class_description.py).
            if traced != derived if self._is_described else traced > derived:
                text = f"{name}: trace {traced} bytes, formula {derived}"
                yield Note("warning", "methods-differ", text)
        if failure := self._run(workload).failure:
            by = "by formula" if self._is_described else "bounded by shorter chunks"
            text = f"weights, caches and states are by trace, the workspace is {by}"
            yield Note("warning", "not-traced", f"{failure}: {text}")

    def _other_classes(self) -> Iterator[Note]:
        """Yield that the classes are not of the version of mlx-lm that is asked for."""
        from memfit.estimators.trace.libraries import versions

        asked, installed = self.runtime.version, versions()["mlx-lm"]
        if self.runtime.versions.mlx_lm != parse_version(installed):
            text = (
                f"the trace runs the classes of mlx-lm {installed}, which is installed: of {asked}"
                " it has the loop of generate alone; the formula has more of its rules"
            )
            yield Note("warning", "other-classes", text)

    def run_calls(self, workload: Workload) -> tuple[RunCall, ...]:
        """Return the memory over each call, at most ``MAX_SPANS`` spans of operations for each."""
        # The calls of a group alone do not show a batch of several.
        peak = None if self.is_grouped(workload) else self._run(workload).peak
        if peak is None:
            return ()
        weights = peak.weight_bytes
        return tuple(
            RunCall(
                call.part,
                call.tokens,
                call.position,
                len(curve),
                _spans(curve, weights),
                weights + call.held_bytes,
            )
            for call in peak.calls
            if (curve := call.curve)
        )


class TracedRun(NamedTuple):
    """One workload on one device: what is left of it, and its largest moment.

    The moment is unknown if the graphs of the run cannot be recorded; ``failure`` says why.
    """

    shapes: "TracedShapes"
    peak: "RunPeak[CallPhase] | None"
    failure: str = ""


def _caches(shapes: "TracedShapes", bytes_per_token: int) -> tuple[KVCache, int]:
    kv = KVCache(
        nbytes=shapes.kv_bytes,
        held_bytes=shapes.kv_held_bytes,
        bytes_per_token=bytes_per_token,
        held_tokens=shapes.held_tokens,
        allocated_tokens=shapes.allocated_tokens,
    )
    return kv, shapes.ssm_bytes


def _spans(curve: tuple[int, ...], weights: int) -> tuple[int, ...]:
    count, total = min(MAX_SPANS, len(curve)), len(curve)
    ends = [total * (span + 1) // count for span in range(count)]
    return tuple(weights + max(curve[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def traced_weights(
    trace: ClassTrace, footprint: WeightFootprint, device: Device | None
) -> WeightFootprint:
    """Return the weights as the class holds them; ``footprint`` is what the formulas say.

    A difference between the two is noted, never averaged. The adapter's tensors are left out.
    """
    weights = trace.weights(device)
    notes, traced_bytes = footprint.notes, sum(weights.values())
    if traced_bytes != footprint.loaded_bytes:
        text = (
            f"loaded weights: trace {traced_bytes} bytes, formula {footprint.loaded_bytes};"
            " the trace is shown"
        )
        notes = (*notes, Note("warning", "methods-differ", text))
    return replace(footprint, sizes=Counter(weights.values()), notes=notes)
