"""mlx-lm by trace: its own class is run lazily in place of the formulas."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import context_limit
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC, Backend, Device
from memfit.estimators.mlx.call_plan import PREFILL
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.kv_cache import KVCache, kv_cache
from memfit.estimators.mlx.versions import MlxVersions, parse_version
from memfit.estimators.results.estimate import Note, RunCall
from memfit.estimators.results.terms import Basis, Phase
from memfit.estimators.runtimes.by_class import TRACE_ERROR_PERCENT, weights_by_trace
from memfit.estimators.runtimes.interface import (
    DraftFigures,
    Figure,
    MemoryFigures,
    RuntimeModel,
    Subject,
)
from memfit.estimators.runtimes.mlx_lm import MlxLm, require_drafting
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.weights.conversion import conversion_type
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.weights.loading import Conversion
from memfit.estimators.workspace.peak import PeakMoment, with_load

# The trace is imported where it runs: a sixth of a formula's answer would be spent on it.
if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter
    from memfit.estimators.trace.graph_format import Call, Trace
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.peak import RunPeak, Start
    from memfit.estimators.trace.traced_model import TracedModel, TracedShapes

_NAMED_ALIVE = 8
MAX_SPANS = 240
# Those of a request, and of a few other prefill steps.
_STARTS = 4


class ClassTrace(Struct, frozen=True, eq=False):
    """mlx-lm's class of a model, built once for a backend and run lazily."""

    checkpoint: Checkpoint
    quantize: Quantization | None
    dtype: str
    is_described: bool
    """Whether formulas know the model too: they find what needs many workloads."""
    adapter: "Adapter | None" = None
    rank: Rank | None = None
    """The rank that has this part of the class, None: it is the whole."""
    phases: frozenset[CallPhase] = ALL_PHASES
    """Of these a run's calls are traced, and the first where another takes on what it leaves."""
    _built: dict[Backend, "TracedModel"] = {}
    _runs: dict[tuple[Workload, Any, MlxVersions, frozenset[CallPhase]], "TracedRun"] = {}
    """By workload, `Device.gpu`, versions and ``phases``."""
    _starts: dict[tuple[Any, MlxVersions], "list[tuple[Call, Start | None]]"] = {}
    """The first chunks of the last runs, by `Device.gpu` and versions."""
    _loads: dict[tuple[Device, MlxVersions], int | None] = {}

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
        """Return the largest moment of a workload, None where its graphs cannot be recorded."""
        traced = self.run(workload, device, versions).peak
        return _moment(traced) if traced else None

    def failure(self, workload: Workload, device: Device | None, versions: MlxVersions) -> str:
        """Return why a workload has no moment, nothing where it has one."""
        return self.run(workload, device, versions).failure

    def _followed(self, workload: Workload, machine: Device, versions: MlxVersions) -> "TracedRun":
        from memfit.estimators.trace.peak import peak
        from memfit.estimators.trace.recording import GraphError

        built = self.built(machine.backend)
        try:
            target = _target(machine, versions)
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
        machine = _target(device, versions)
        with not_collecting():
            return speculative_peak(target, other, workload, tokens, machine=machine, device=device)

    def load_bytes(self, machine: Device, versions: MlxVersions) -> int | None:
        """Return the peak of the load, 0 if nothing is converted, None if it is not known."""
        from memfit.estimators.trace.kernel_stubs import TraceTarget
        from memfit.estimators.trace.peak import load_peak

        asked = machine, versions
        if asked not in self._loads:
            target = TraceTarget(backend=machine.backend, versions=versions)
            try:
                call = self.built(machine.backend).load(target)
                self._loads[asked] = load_peak(call, machine, versions.mlx) if call else 0
            except UnsupportedError:
                self._loads[asked] = None
        return self._loads[asked]

    def shapes(self, workload: Workload) -> "TracedShapes":
        """Return the bytes that the class holds when a workload ends."""
        built = next(iter(self._built.values()), None) or self.built(ANY_MAC.backend)
        return built.shapes(workload)

    def built(self, backend: Backend) -> "TracedModel":
        """Return the class as it is built on a backend's machine."""
        from memfit.estimators.trace.traced_model import TracedModel

        if backend not in self._built:
            self._built[backend] = TracedModel(
                self.checkpoint.config,
                backend,
                name=self.checkpoint.config_name,
                dtype=self.dtype,
                tensors=self.checkpoint.tensors,
                quantize=self.quantize,
                adapter=self.adapter,
                rank=self.rank,
            )
        return self._built[backend]

    def of_rank(self, rank: Rank) -> "ClassTrace":
        """Return the trace of one rank's part."""
        return self._made(self.quantize, rank)

    def converted(self, quantize: Quantization) -> "ClassTrace":
        """Return the trace of the class with its weights converted."""
        return self._made(quantize, self.rank)

    def _made(self, quantize: Quantization | None, rank: Rank | None) -> "ClassTrace":
        # Not by `replace`, which would share what was built.
        checkpoint, described = self.checkpoint, self.is_described
        dtype = (conversion_type(checkpoint.config) if quantize else None) or self.dtype
        return ClassTrace(checkpoint, quantize, dtype, described, self.adapter, rank)

    def weights(self, device: Device | None) -> Mapping[str, int]:
        """Return the bytes of each parameter by path, without those of the adapter."""
        weights = self.built((device or ANY_MAC).backend).weights
        added = {tensor.name for tensor in self.adapter.tensors} if self.adapter else set()
        return {path: nbytes for path, nbytes in weights.items() if path not in added}

    def unread_format(self, device: Device | None) -> str | None:
        """Return the declared quantisation method where the weights are not sized in it."""
        return self.built((device or ANY_MAC).backend).unread_format

    def versions(self) -> str:
        """Return the versions of what was run."""
        from memfit.estimators.trace.libraries import versions

        return ", ".join(f"{name} {version}" for name, version in versions().items())

    def description(self, device: Device | None) -> Model:
        """Return what formulas and plans need of the model, from the class itself.

        Raises:
            UnsupportedError: for a cache or a list of experts that is not described.
        """
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

    method = "trace"
    workspace_basis: ClassVar[tuple[Basis, int]] = ("traced", TRACE_ERROR_PERCENT)

    @classmethod
    def class_trace(
        cls,
        checkpoint: Checkpoint,
        quantize: Quantization | None,
        dtype: str,
        adapter: "Adapter | None",
    ) -> ClassTrace:
        """Return the trace of a model that no family describes."""
        return ClassTrace(checkpoint, quantize, dtype, is_described=False, adapter=adapter)

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
        return MemoryFigures(kv, states, with_load(moment, self.load_bytes))

    def caches(self, workload: Workload) -> tuple[KVCache, int]:
        """Return keys and values, and the bytes of states, of sequences that decode together."""
        per_token = kv_cache(self.subject.model, workload).bytes_per_token
        return _caches(self.trace.shapes(workload), per_token)

    @property
    def load_bytes(self) -> int:
        """The peak of the load; by formula where its graph cannot be recorded.

        Of a rank that reads whole arrays the trace has one order of reads and copies, the formula
        the largest of several.
        """
        traced = self.trace.load_bytes(self.subject.device or ANY_MAC, self.runtime.versions)
        return super().load_bytes if traced is None else max(traced, self._cut_load.expected)

    def parallel(self, asked: Parallel | None) -> Parallel:
        if self.trace.is_described:
            return MlxLm.parallel(self, asked)
        return self.trace.built(self.subject.backend).parallel(asked)

    def of_rank(self, rank: Rank) -> "MlxLmTrace":
        """Return the part of one rank, as the class itself cuts it."""
        subject, trace = self.subject, self.trace.of_rank(rank)
        if trace.is_described:
            subject = MlxLm.of_rank(self, rank).subject
            footprint = traced_weights(trace, subject.footprint, subject.device)
            return replace(self, subject=replace(subject, footprint=footprint), trace=trace)
        # traced_workspace.TracedWorkspace, which imports this module.
        workspace: Any = subject.traced
        model = trace.description(subject.device)
        footprint = weights_by_trace(trace, model, subject.footprint.plan, subject.device)
        subject = replace(
            subject,
            model=model,
            footprint=replace(footprint, notes=subject.footprint.notes),
            traced=replace(workspace, trace=trace),
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
            return ("bound", 0) if self.subject.traced else MlxLm.workspace_basis
        return MlxLm.basis(self, figure, workload)

    def drafted(self, workload: Workload, draft: RuntimeModel, tokens: int) -> DraftFigures:
        """Return what both classes take in mlx-lm's loop above this one; by formula without graphs.

        Raises:
            UnsupportedError: when mlx-lm rejects or ignores what is asked.
        """
        if not (self.is_mlx_lm and isinstance(draft, MlxLmTrace)):
            return MlxLm.drafted(self, workload, draft, tokens)
        require_drafting(self.subject.model, workload)
        from memfit.estimators.trace.recording import GraphError

        device, versions = self.subject.device or ANY_MAC, self.runtime.versions
        try:
            peak = self.trace.drafted(draft.trace, workload, tokens, device, versions)
        except GraphError:
            return MlxLm.drafted(self, workload, draft, tokens)
        phase: Phase = "prefill" if peak.top.part in PREFILL else "decode"
        workspace = peak.top.nbytes - dict(peak.alive).get("caches", 0)
        lines = "".join(_lines(peak))
        both = DraftFigures(peak.nbytes, "traced", phase, lines, workspace_bytes=workspace)
        return self._above_alone(both, draft, self.figures(workload))

    def formula_view(self) -> MlxLm:
        """Return mlx-lm by formula, with a workspace between traced prompts where none has it."""
        # The load does not depend on the workload, so it stays by trace.
        cut = max(self.resident_bytes, self._cut_load.expected)
        made = (Conversion(0, max(0, self.load_bytes - cut)),)
        footprint = replace(self.subject.footprint, conversions=made, first=())
        return MlxLm(self.runtime, replace(self.subject, footprint=footprint))

    def phases_view(self, phases: frozenset[CallPhase]) -> "MlxLmTrace":
        """Return the same for the calls of these phases alone."""
        return replace(self, trace=replace(self.trace, phases=phases))

    def assumptions(self, workload: Workload, units: Units) -> Iterator[str]:
        """Yield the versions of what was run, and what an estimate assumes."""
        yield f"traced with {self.trace.versions()}"
        yield from MlxLm.assumptions(self, workload, units)

    def notes(self, workload: Workload, figures: MemoryFigures, units: Units) -> Iterator[Note]:
        """Yield where formulas differ, and what the workspace rests on where it is no trace."""
        yield from MlxLm.notes(self, workload, figures, units)
        yield from self._other_classes()
        kv, states = MlxLm.caches(self, replace(workload, batch=self.decoding_rows(workload)))
        for name, traced, derived in (
            ("KV cache", figures.kv.nbytes, kv.nbytes),
            ("recurrent state", figures.ssm_bytes, states),
        ):
            # A few caches of classes without a formula have a bound (class_description.py).
            if traced != derived if self.trace.is_described else traced > derived:
                text = f"{name}: trace {traced} bytes, formula {derived}"
                yield Note("warning", "methods-differ", text)
        if failure := self._run(workload).failure:
            by = "bounded by shorter chunks" if self.subject.traced else "by formula"
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
            RunCall(call.part, call.tokens, call.position, len(curve), _spans(curve, weights))
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


def _target(machine: Device, versions: MlxVersions) -> "TraceTarget":
    from memfit.estimators.trace.kernel_stubs import TraceTarget

    return TraceTarget(
        backend=machine.backend,
        nax=has_nax(machine),
        compute_capability=machine.generation if machine.backend == "cuda" else None,
        versions=versions,
    )


def _lines(peak: "RunPeak[CallPhase]") -> tuple[str, str]:
    named = ", ".join(f"{name} {nbytes}" for name, nbytes in peak.alive[:_NAMED_ALIVE])
    top = peak.top
    return (
        f"peak by trace = {peak.nbytes} bytes in {top.part}, at {top.operation}",
        f"  alive then: {named}",
    )


def _moment(peak: "RunPeak[CallPhase]") -> PeakMoment:
    prefill = [nbytes for part, nbytes in peak.parts.items() if part in PREFILL]
    decode = [nbytes for part, nbytes in peak.parts.items() if part not in PREFILL]
    return PeakMoment(
        phase="prefill" if peak.top.part in PREFILL else "decode",
        nbytes=peak.nbytes,
        workspace_bytes=peak.workspace_bytes,
        largest_buffer_bytes=peak.largest_buffer_bytes,
        largest_buffer=peak.top.operation,
        explanation=_lines(peak),
        prefill_bytes=max(prefill, default=peak.weight_bytes),
        decode_bytes=max(decode, default=peak.weight_bytes),
        call_bytes={
            call.part: peak.weight_bytes + max(call.curve) for call in peak.calls if call.curve
        },
        batch_bytes=peak.top.batch_bytes,
    )
