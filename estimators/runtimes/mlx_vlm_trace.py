"""mlx-vlm by trace: a prompt, with images or without, is run lazily through mlx-vlm's own class."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec import UNSET, field
from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model, Part
from memfit.estimators.arch.registry import context_limit
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import MachineError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.images.processor import image_plan
from memfit.estimators.machine.device import ANY_MAC, Backend, Device
from memfit.estimators.mlx.kv_cache import (
    buffer_counts,
    buffer_token_bytes,
    capacity_at,
    kv_cache,
    state_bytes,
)
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis, PeakMoment
from memfit.estimators.runtimes.by_class import (
    ModelTrace,
    described_by_class,
    peak_lines,
    trace_target,
)
from memfit.estimators.runtimes.held import without_held
from memfit.estimators.runtimes.interface import Figure, MemoryFigures, Subject
from memfit.estimators.runtimes.mlx_vlm import (
    MlxVlm,
    as_cached,
    lacks_formula,
    reject_batch_windows,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import TRACE_ERROR_PERCENT, Source, Traced
from memfit.estimators.weights.conversion import conversion_type
from memfit.estimators.weights.derived import part_of

# The trace is imported where it runs, as that of mlx-lm is.
if TYPE_CHECKING:
    from memfit.estimators.trace.peak import RunPeak
    from memfit.estimators.trace.vision_model import TracedVisionModel
    from memfit.estimators.trace.vision_peak import VisionPart

_NO_IMAGES = ImagePlan((), ())


class VisionTracedRun(NamedTuple):
    """The largest moment of a workload, or why there is none."""

    peak: "RunPeak[VisionPart] | None"
    failure: str = ""


class VisionTrace(ModelTrace, frozen=True, eq=False):
    """mlx-vlm's class of a model; it runs on one machine."""

    _unconverted_load = None
    _runs: dict[tuple[Workload, ImagePlan, object, MlxVersions], VisionTracedRun] = field(
        default_factory=dict
    )
    """By workload, what its images become, `Device.gpu` and versions."""
    _described: dict[Backend, Model] = field(default_factory=dict)

    def run(
        self, workload: Workload, device: Device | None, versions: MlxVersions
    ) -> VisionTracedRun:
        """Return the largest moments of a prompt, or why it cannot be traced."""
        machine = device or ANY_MAC
        plan = image_plan(self.checkpoint, workload.images) if workload.images else _NO_IMAGES
        # Images that the processor resizes to the same size are one.
        key = replace(workload, images=UNSET, max_tokens=0), plan, machine.gpu, versions
        if key not in self._runs:
            try:
                self._runs[key] = VisionTracedRun(self._followed(workload, plan, machine, versions))
            except (MachineError, UnsupportedError) as error:
                self._runs[key] = VisionTracedRun(None, str(error))
        return self._runs[key]

    def moment(
        self, workload: Workload, device: Device | None, versions: MlxVersions
    ) -> PeakMoment | None:
        peak = self.run(workload, device, versions).peak
        if peak is None:
            return None
        model = as_cached(self.checkpoint, self.description(device), workload)
        kept = kv_cache(model, workload).nbytes + state_bytes(model, workload.batch)
        return moment_of(peak, peak.weight_bytes, kept, _last_decode(peak, model, workload))

    def _followed(
        self, workload: Workload, plan: ImagePlan, machine: Device, versions: MlxVersions
    ) -> "RunPeak[VisionPart]":
        from memfit.estimators.trace.vision_peak import vision_peak

        reject_batch_windows(workload)
        built = self.built(machine.backend)
        run = built.record(plan, workload, trace_target(machine, versions))
        return vision_peak(run, built.weights, machine, versions.mlx)

    def converted(self, quantize: Quantization) -> "VisionTrace":
        dtype = conversion_type(self.checkpoint.config) or self.dtype
        return VisionTrace(self.checkpoint, quantize, dtype)

    def _build(self, backend: Backend) -> "TracedVisionModel":
        from memfit.estimators.trace.vision_model import TracedVisionModel

        return TracedVisionModel(
            self.checkpoint.config,
            backend,
            name=self.checkpoint.config_name,
            dtype=self.dtype,
            tensors=self.checkpoint.tensors,
            quantize=self.quantize,
        )

    def versions(self) -> str:
        """Return the versions of what was run."""
        built = next(iter(self._built.values()))
        return ", ".join(f"{name} {version}" for name, version in built.versions.items())

    def description(self, device: Device | None) -> Model:
        from memfit.estimators.trace.declared_format import unquantised
        from memfit.estimators.trace.vision_model import TracedVisionModel

        backend = (device or ANY_MAC).backend
        if backend not in self._described:
            config, name = self.checkpoint.config, self.checkpoint.config_name
            plain = TracedVisionModel(unquantised(config), backend, name=name, dtype=self.dtype)
            limit = context_limit(config_fields(config, name))
            self._described[backend] = replace(plain.describe(), max_context=limit)
        return self._described[backend]


class MlxVlmTrace(MlxVlm, frozen=True, kw_only=True):
    """mlx-vlm by trace of its own class."""

    trace: VisionTrace

    class_trace: ClassVar[type[ModelTrace]] = VisionTrace
    _workspace_basis: ClassVar[tuple[Basis, int]] = ("traced", TRACE_ERROR_PERCENT)

    @property
    def source(self) -> Source:
        return Traced()

    @classmethod
    def by_trace(cls, runtime: Runtime, subject: Subject) -> MlxVlm:
        """Return the model under mlx-vlm.

        Raises:
            UnsupportedError: as for `MlxVlm`.
        """
        formula = MlxVlm.by_formula(runtime, subject)
        plan = subject.footprint.plan
        quantize = plan.default if plan and plan.converting else None
        trace = VisionTrace(subject.checkpoint, quantize, subject.model.dtype)
        if lacks_formula(subject):
            try:
                return cls.of_class(runtime, described_by_class(trace, subject.device), trace)
            except (MachineError, UnsupportedError):
                return formula
        return cls(runtime, subject, formula.tower_sizes, trace=trace)

    @classmethod
    def of_class(cls, runtime: Runtime, subject: Subject, trace: VisionTrace) -> MlxVlm:
        weights = trace.weights(subject.device)
        towers = tuple(size for path, size in weights.items() if part_of(path) is Part.VISION)
        return cls(runtime, subject, towers, trace=trace)

    def _library(self) -> str:
        return self.runtime.name

    def _run(self, workload: Workload) -> VisionTracedRun:
        workload = self._in_one_call(workload)
        return self.trace.run(workload, self.subject.device, self.runtime.versions)

    def load_bytes(self) -> int:
        """Return the peak of the load; by formula where its graph cannot be recorded."""
        traced = self.trace.load_bytes(self.subject.device or ANY_MAC, self.runtime.versions)
        return super().load_bytes() if traced is None else max(traced, self.resident_bytes())

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes; by formula where it cannot be traced.

        Raises:
            UnsupportedError: when neither describes it.
        """
        if workload.images:
            self.require_tower()
        workload = self._in_one_call(workload)
        peak, failure = self._run(workload)
        if peak is None:
            try:
                return MlxVlm.figures(self, workload)
            except UnsupportedError as error:
                # Between traced prompts it is the same.
                both = f"{error}; by trace: {failure}"
                raise UnsupportedError(failure if str(error) == failure else both) from None
        model = as_cached(self.subject.checkpoint, self.subject.model, workload)
        kv, states = kv_cache(model, workload), state_bytes(self.subject.model, workload.batch)
        last = _last_decode(peak, model, workload)
        moment = moment_of(peak, self.resident_bytes(), kv.nbytes + states, last)
        figures = MemoryFigures(kv, states, moment.with_load(self.load_bytes()))
        figures = self.with_whole_logits(figures, workload)
        return without_held(figures) if workload.batch > 1 else figures

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        is_traced = figure == "workspace" and not self._has_whole_logits(workload)
        if is_traced and self._run(workload).peak:
            return self._workspace_basis
        return MlxVlm.basis(self, figure, workload)

    def formula(self) -> MlxVlm:
        """Return mlx-vlm by formula, or between traced prompts where there is none."""
        return MlxVlm(self.runtime, self.subject, self.tower_sizes)

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        """Yield the versions of what was run, and what an estimate assumes."""
        if self._run(workload).peak:
            yield f"traced with {self.trace.versions()}"
        yield from super()._assumptions(workload)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield what the figures rest on where they are no trace."""
        peak, failure = self._run(workload)
        if peak is None:
            yield from super()._notes(workload, figures)
            yield Note("warning", "not-traced", f"not traced: {failure}")
            return
        if not workload.images:
            yield from super()._notes(workload, figures)
        if peak.weight_bytes != self.resident_bytes():
            text = (
                f"weights: mlx-vlm's class holds {peak.weight_bytes} bytes, the headers and"
                f" formulas say {self.resident_bytes()}"
            )
            yield Note("warning", "methods-differ", text)


def moment_of(
    peak: "RunPeak[VisionPart]", resident_bytes: int, kept_bytes: int, last_decode: int
) -> PeakMoment:
    """Return the largest moment of a traced prompt, and of decoding as long as is asked.

    ``last_decode`` is the most while the last token is decoded, with the weights of the class.
    """
    # The weights that are shown, also where the class holds others.
    more = resident_bytes - peak.weight_bytes
    parts = {part: nbytes + more for part, nbytes in peak.parts.items()}
    decode = max(parts["decode"], last_decode + more)
    prefill = max(nbytes for part, nbytes in parts.items() if part != "decode")
    nbytes = max(prefill, decode)
    # In decoding a copy of the caches, as in the traced steps, which are the first.
    held = {part: each + more for part, each in peak.held.items()}
    held["decode"] += last_decode - peak.parts["decode"]
    most = max(held, key=held.__getitem__)
    return PeakMoment(
        phase=peak.top.part if nbytes == peak.nbytes + more else "decode",
        nbytes=nbytes,
        workspace_bytes=max(0, nbytes - resident_bytes - kept_bytes),
        largest_buffer_bytes=peak.largest_buffer_bytes,
        largest_buffer=peak.top.operation,
        explanation=peak_lines(peak),
        prefill_bytes=prefill,
        decode_bytes=decode,
        held_bytes=max(held[most], nbytes),
        held_phase=most,
    )


def _last_decode(peak: "RunPeak[VisionPart]", model: Model, workload: Workload) -> int:
    """Return a bound on the memory in use when the last token is decoded.

    The first two tokens are traced. Until the last one caches grow, at the end by copying one.
    """
    if workload.max_tokens <= 2:
        return peak.parts["decode"]
    tokens = workload.total_tokens
    ended, begun = kv_cache(model, workload), kv_cache(model, replace(workload, max_tokens=1))
    copied = (
        capacity_at(buffer, workload, tokens) * buffer_token_bytes(model, buffer, workload, tokens)
        for buffer in buffer_counts(model, workload.max_kv_size)
    )
    grown = max(0, ended.nbytes - begun.nbytes)
    return peak.parts["decode"] + grown + workload.batch * max(copied, default=0)
