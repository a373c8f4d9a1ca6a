"""mlx-vlm by trace: a prompt with images is run lazily through mlx-vlm's own class."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import MachineError, UnsupportedError
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.processor import image_plan
from memfit.estimators.machine.device import ANY_MAC, Backend, Device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.estimate import Basis, Note
from memfit.estimators.runtimes.interface import Figure, MemoryFigures, RuntimeModel, Subject
from memfit.estimators.runtimes.mlx_lm import MlxLm
from memfit.estimators.runtimes.mlx_lm_trace import TRACE_ERROR_PERCENT
from memfit.estimators.runtimes.mlx_vlm import MlxVlm
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.workspace.peak import PeakMoment, with_load

# The trace is imported where it runs, as that of mlx-lm is.
if TYPE_CHECKING:
    from memfit.estimators.trace.vision_model import TracedVisionModel
    from memfit.estimators.trace.vision_peak import VisionPeak

_NAMED_ALIVE = 8


class VisionTrace(Struct, frozen=True, eq=False):
    """mlx-vlm's class of a model, built once for a backend and run lazily."""

    checkpoint: Checkpoint
    dtype: str
    _built: dict[Backend, "TracedVisionModel"] = {}
    _peaks: dict[tuple[Workload, object, MlxVersions], "VisionPeak | str"] = {}
    """By workload, `Device.gpu` and versions; the reason where there is none."""

    def peak(
        self, workload: Workload, device: Device | None, versions: MlxVersions
    ) -> "VisionPeak | str":
        """Return the largest moments of a prompt with images, or why they cannot be traced."""
        machine = device or ANY_MAC
        key = workload, machine.gpu, versions
        if key not in self._peaks:
            try:
                self._peaks[key] = self._followed(workload, machine, versions)
            except (MachineError, UnsupportedError) as error:
                self._peaks[key] = str(error)
        return self._peaks[key]

    def _followed(self, workload: Workload, machine: Device, versions: MlxVersions) -> "VisionPeak":
        from memfit.estimators.trace.kernel_stubs import TraceTarget
        from memfit.estimators.trace.vision_model import TracedVisionModel
        from memfit.estimators.trace.vision_peak import vision_peak

        assert workload.images
        if workload.batch > 1:
            raise UnsupportedError("several prompts at a time are not traced with images")
        if workload.kv_bits is not None:
            raise UnsupportedError("KV bits: a quantised cache is not traced with images")
        plan = image_plan(self.checkpoint, workload.images)
        backend = machine.backend
        if backend not in self._built:
            self._built[backend] = TracedVisionModel(
                self.checkpoint.config,
                backend,
                name=self.checkpoint.config_name,
                dtype=self.dtype,
                tensors=self.checkpoint.tensors,
            )
        built = self._built[backend]
        target = TraceTarget(
            backend=backend,
            nax=has_nax(machine),
            compute_capability=machine.generation if backend == "cuda" else None,
            versions=versions,
        )
        run = built.record(plan, workload, target)
        return vision_peak(run, built.weights, machine, versions.mlx)


class MlxVlmTrace(MlxVlm, frozen=True, kw_only=True):
    """mlx-vlm with images by trace; a text prompt is as by formula."""

    trace: VisionTrace

    method = "trace"
    workspace_basis: ClassVar[tuple[Basis, int]] = ("traced", TRACE_ERROR_PERCENT)

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> RuntimeModel:
        """Return the model under mlx-vlm.

        Raises:
            UnsupportedError: as for `MlxVlm`.
        """
        formula = MlxVlm.bound(runtime, subject)
        assert isinstance(formula, MlxVlm)
        trace = VisionTrace(subject.checkpoint, subject.model.dtype)
        return cls(runtime, subject, formula.tower_sizes, trace=trace)

    def _peak(self, workload: Workload) -> "VisionPeak | str":
        return self.trace.peak(workload, self.subject.device, self.runtime.versions)

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes; by formula where it cannot be traced.

        Raises:
            UnsupportedError: when neither describes it.
        """
        if not workload.images:
            return MlxVlm.figures(self, workload)
        self.require_tower()
        peak = self._peak(workload)
        if isinstance(peak, str):
            try:
                return MlxVlm.figures(self, workload)
            except UnsupportedError as error:
                raise UnsupportedError(f"{error}; by trace: {peak}") from None
        text = MlxLm.figures(self, workload)
        kept = text.kv.nbytes + text.ssm_bytes
        moment = _moment(peak, text.moment, self.resident_bytes, kept)
        return replace(text, moment=with_load(moment, self.load_bytes))

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return a figure's basis; with images the workspace is traced."""
        if figure == "workspace" and workload.images and not isinstance(self._peak(workload), str):
            return self.workspace_basis
        return MlxVlm.basis(self, figure, workload)

    def formula_view(self) -> MlxVlm:
        """Return mlx-vlm by formula."""
        return MlxVlm(self.runtime, self.subject, self.tower_sizes)

    def assumptions(self, workload: Workload, units: Units) -> Iterator[str]:
        """Yield the versions of what was run, and what an estimate assumes."""
        if workload.images and not isinstance(self._peak(workload), str):
            built = next(iter(self.trace._built.values()))
            names = ", ".join(f"{name} {version}" for name, version in built.versions.items())
            yield f"images are traced with {names}"
        yield from MlxVlm.assumptions(self, workload, units)

    def notes(self, workload: Workload, figures: MemoryFigures, units: Units) -> Iterator[Note]:
        """Yield what the figures rest on where they are no trace."""
        peak = self._peak(workload) if workload.images else ""
        if isinstance(peak, str):
            yield from MlxVlm.notes(self, workload, figures, units)
            if peak:
                yield Note("warning", "not-traced", f"images are not traced: {peak}")
        elif peak.weight_bytes != self.resident_bytes:
            text = (
                f"weights: mlx-vlm's class holds {peak.weight_bytes} bytes, the headers and"
                f" formulas say {self.resident_bytes}"
            )
            yield Note("warning", "methods-differ", text)


def _moment(
    peak: "VisionPeak", text: PeakMoment, resident_bytes: int, kept_bytes: int
) -> PeakMoment:
    """The largest moment of a traced prompt, and of decoding as long as is asked."""
    # The weights that are shown, also where the class holds others.
    more = resident_bytes - peak.weight_bytes
    parts = {part: nbytes + more for part, nbytes in peak.parts.items()}
    decode = max(parts["decode"], text.decode_bytes or 0)
    prefill = max(nbytes for part, nbytes in parts.items() if part != "decode")
    nbytes = max(prefill, decode)
    alive = ", ".join(f"{name} {size}" for name, size in peak.alive[:_NAMED_ALIVE])
    return PeakMoment(
        phase=peak.part if nbytes == peak.nbytes + more else "decode",
        nbytes=nbytes,
        workspace_bytes=max(0, nbytes - resident_bytes - kept_bytes),
        largest_buffer_bytes=peak.largest_buffer_bytes,
        largest_buffer=peak.operation,
        explanation=(
            f"peak by trace = {peak.nbytes} bytes in {peak.part}, at {peak.operation}",
            f"  alive then: {alive}",
        ),
        prefill_bytes=prefill,
        decode_bytes=decode,
    )
