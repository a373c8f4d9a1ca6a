"""The workspace of a class whose graphs are recorded, to the byte and without MLX."""

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import context_limit, dtype_of
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import MachineError, UnsupportedError
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC, Backend, Device, GpuClass
from memfit.estimators.mlx.call_plan import PlannedCall, planned_calls
from memfit.estimators.mlx.kv_cache import capacity_at, kv_cache, kv_format, state_bytes
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.programs.dimensions import QUANTISED_FEATURES
from memfit.estimators.programs.library import (
    RECORDED_DTYPE,
    RecordedModel,
    find,
    recorded_model,
)
from memfit.estimators.results.terms import Lines, PeakMoment
from memfit.estimators.runtimes.by_class import (
    TracedWorkspace,
    moment_of,
    peak_lines,
    trace_target,
)
from memfit.estimators.runtimes.interface import RuntimeModel, Subject
from memfit.estimators.runtimes.mlx_lm_trace import ClassTrace, MlxLmTrace
from memfit.estimators.runtimes.source import Interpolated, Recorded
from memfit.estimators.weights.activations import activation_type
from memfit.estimators.weights.conversion import conversion_type, convert
from memfit.estimators.weights.derived import QuantizationPlan, derive
from memfit.estimators.weights.footprint import load_footprint
from memfit.estimators.weights.quantization_plan import declared

if TYPE_CHECKING:
    from memfit.estimators.programs.run import Programs
    from memfit.estimators.trace.peak import RunPeak
    from memfit.estimators.trace.replay import CallPeak

_ITEM_BYTES = 2
# mlx_lm/generate.py, BatchGenerator: prefill_batch_size.
_LARGEST_BATCH = 8


class RecordedWorkspace(Struct, frozen=True, eq=False):
    """The workspace of a recorded class at the sizes of a config.

    Runs that no recording has are traced, where MLX is installed.
    """

    class_model: RecordedModel
    model: Model
    packing: Quantization | None
    """The format of all matrices, None: they are not packed."""
    largest_weight: int
    """Bytes of the largest parameter."""
    traced: TracedWorkspace
    _runs: dict[tuple[Workload, object, MlxVersions], "RunPeak[CallPhase]"] = field(
        default_factory=dict
    )

    def converted(self, quantize: Quantization) -> "RecordedWorkspace":
        """Return the workspace of the class with its weights converted."""
        sizes = derive(self.model, QuantizationPlan(quantize, converting=True)).sizes
        return RecordedWorkspace(
            self.class_model,
            self.model,
            quantize,
            max(sizes),
            self.traced.converted(quantize),
        )

    def peak(
        self, workload: Workload, device: Device | None, versions: MlxVersions, kept_bytes: int
    ) -> PeakMoment:
        """Return the peak of a workload that keeps ``kept_bytes`` of weights, caches and states.

        Raises:
            UnsupportedError: when no recording has such a run, and it cannot be traced here.
        """
        try:
            run = self._run(workload, device or ANY_MAC, versions, kept_bytes)
        except UnsupportedError as error:
            return self._traced(workload, device, versions, kept_bytes, error)
        named = partial(self._named, workload, device or ANY_MAC, versions, run)
        return replace(moment_of(run), explanation=Lines(named))

    def by_trace(self, model: RuntimeModel) -> RuntimeModel:
        """Return the model of the class's trace, which answers for its ranks.

        Raises:
            MachineError: when MLX is not installed.
        """
        trace, subject = self.traced.trace, model.subject
        assert isinstance(trace, ClassTrace)
        trace.built(subject.backend)
        subject = replace(subject, source=Interpolated(self.traced), method="trace")
        return MlxLmTrace(model.runtime, subject, trace)

    def _traced(
        self,
        workload: Workload,
        device: Device | None,
        versions: MlxVersions,
        kept_bytes: int,
        unrecorded: UnsupportedError,
    ) -> PeakMoment:
        try:
            moment = self.traced.trace.moment(workload, device, versions)
            return moment or self.traced.peak(workload, device, versions, kept_bytes)
        except MachineError as error:
            raise UnsupportedError(f"{unrecorded}; by trace: {error}") from None

    def _run(
        self, workload: Workload, device: Device, versions: MlxVersions, kept_bytes: int
    ) -> "RunPeak[CallPhase]":
        # A prompt of one chunk is the same with every larger step.
        step = min(workload.prefill_step, workload.prompt_tokens)
        workload = replace(workload, prefill_step=step)
        key = workload, device.gpu, versions
        if key not in self._runs:
            self._runs[key] = self._followed(workload, device, versions, kept_bytes)
        return self._runs[key]

    def _followed(
        self, workload: Workload, device: Device, versions: MlxVersions, kept_bytes: int
    ) -> "RunPeak[CallPhase]":
        from memfit.estimators.trace.peak import run_peak

        self._require_recorded(workload)
        caches = kv_cache(self.model, workload).nbytes + state_bytes(self.model, workload.batch)
        run = run_peak(
            self._calls(workload, device, versions),
            {},
            device,
            kept_bytes=caches,
            largest_kept=max(self.largest_weight, self._largest_cache(workload)),
        )
        resident = kept_bytes - caches
        return replace(
            run,
            nbytes=run.nbytes + resident,
            weight_bytes=resident,
            parts={part: nbytes + resident for part, nbytes in run.parts.items()},
            held={part: nbytes + resident for part, nbytes in run.held.items()},
            alive=(("weights", resident),),
        )

    def _calls(
        self, workload: Workload, device: Device, versions: MlxVersions, *, named: bool = False
    ) -> "list[CallPeak[CallPhase]]":
        programs, planned = self._programs_on(device, versions), self._planned(workload, versions)
        return programs.peaks(self._sizes(), workload, planned, named=named)

    def _named(
        self,
        workload: Workload,
        device: Device,
        versions: MlxVersions,
        run: "RunPeak[CallPhase]",
    ) -> tuple[str, ...]:
        """Return the lines that explain a peak."""
        calls = self._calls(workload, device, versions, named=True)
        top = max(calls, key=lambda call: call.nbytes)
        return peak_lines(replace(run, alive=(*run.alive, *top.alive)))

    def _require_recorded(self, workload: Workload) -> None:
        unrecorded = self.class_model.unrecorded
        # More are prefilled in groups, which `TracedWorkspace` puts together.
        if workload.batch > _LARGEST_BATCH:
            raise unrecorded(f"batch of {workload.batch} sequences")
        known = set(self.class_model.recorded.features)
        if workload.kv_bits is not None and not known.issuperset(QUANTISED_FEATURES):
            raise unrecorded("quantised caches (--kv-bits)")
        if workload.max_kv_size is not None and not self.model.makes_own_cache:
            raise unrecorded("rotating caches (--max-kv-size)")

    def _sizes(self) -> dict[str, int]:
        return self.class_model.packed_sizes(self.packing)

    def _programs_on(self, device: Device, versions: MlxVersions) -> "Programs":
        known, recorded = self.class_model, self.class_model.recorded
        variant = recorded.variants.index(known.variant(self.packing, device.backend))
        return _programs_of(recorded.model_type, variant, known.kinds, device.gpu, versions)

    def _planned(self, workload: Workload, versions: MlxVersions) -> tuple[PlannedCall, ...]:
        """Return the calls of a run, of those where a buffer may grow the ones where one does."""
        buffers = set(self.model.kv_buffers())

        def grows(position: int) -> bool:
            return any(
                capacity_at(each, workload, position) != capacity_at(each, workload, position + 1)
                for each in buffers
            )

        planned = planned_calls(workload, versions)
        return tuple(c for c in planned if c.phase != "growing" or grows(c.position))

    def _largest_cache(self, workload: Workload) -> int:
        """Return the bytes of the largest array that a cache holds when a run has ended."""
        tokens, largest = workload.total_tokens, 0
        for each in set(self.model.kv_buffers()):
            bits = kv_format(each, workload, _ITEM_BYTES, tokens).bits or 8 * _ITEM_BYTES
            row = each.heads * max(each.key_dim, each.value_dim) * bits // 8
            largest = max(largest, workload.batch * row * capacity_at(each, workload, tokens))
        return largest


@lru_cache(maxsize=8)
def _programs_of(
    model_type: str,
    variant: int,
    kinds: tuple[str, ...],
    gpu: tuple[Backend, GpuClass | None, int | None],
    versions: MlxVersions,
) -> "Programs":
    """Return the programs that all models of a class share on a kind of device.

    ``variant`` is its position in the data of the class.
    """
    from memfit.estimators.programs.run import Programs

    recorded = find(model_type)
    assert recorded is not None
    backend, gpu_class, generation = gpu
    device = Device("any", backend, 0, 0, None, "flag", gpu_class, generation)
    target = trace_target(device, versions)
    return Programs(recorded, recorded.variants[variant], kinds, device, target)


def packing_of(model: Model, plan: QuantizationPlan | None) -> Quantization | None:
    """Return the format of all matrices of a plan, None where they are not packed.

    Raises:
        UnsupportedError: when modules have formats that `mlx_lm.convert` would not give them.
    """
    if plan is None:
        return None
    uniform = QuantizationPlan(plan.default, converting=True)
    for path, module in model.all_modules():
        packing = plan.quantization(path, module)
        is_left_out = packing is None and module.quantizable and module.predicate is not False
        if is_left_out or packing != uniform.quantization(path, module):
            raise UnsupportedError(f"the recorded graphs have no format of its own for {path}")
    return plan.default


def recorded_subject(
    checkpoint: Checkpoint, quantize: Quantization | None, device: Device | None
) -> Subject | None:
    """Return a checkpoint as the recorded data of its class describes it.

    None where no recording is like it: of its settings, its formats, or the names of its tensors,
    which the class then changes while it loads them.
    """
    recorded = find(str(checkpoint.config.get("model_type")))
    # The trace says that memfit never runs the code of a model.
    if recorded is None or checkpoint.config.get("model_file") is not None:
        return None
    try:
        class_model = recorded_model(recorded, checkpoint.config)
        model = replace(
            class_model.description(),
            max_context=context_limit(config_fields(checkpoint.config, checkpoint.config_name)),
        )
        return _subject(class_model, model, checkpoint, quantize, device)
    except UnsupportedError:
        return None


def _subject(
    class_model: RecordedModel,
    model: Model,
    checkpoint: Checkpoint,
    quantize: Quantization | None,
    device: Device | None,
) -> Subject:
    block = declared(checkpoint.config, model, checkpoint.config_name)
    dtype = dtype_of(
        config_fields(checkpoint.config, checkpoint.config_name), checkpoint.config_name
    )
    dtype = (conversion_type(checkpoint.config) if quantize else None) or dtype
    if dtype != RECORDED_DTYPE or activation_type(checkpoint, model, block) != RECORDED_DTYPE:
        raise class_model.unrecorded(f"parameters of {dtype}")
    footprint = load_footprint(checkpoint, model, block)
    if footprint.basis == "bound" or (checkpoint.tensors and not footprint.loaded):
        raise class_model.unrecorded("such tensors")
    if quantize:
        plan = QuantizationPlan(quantize, converting=True)
        model, footprint = convert(checkpoint.config, model, plan, block, footprint.loaded)
    traced = TracedWorkspace(ClassTrace(checkpoint, quantize, dtype), model.max_context)
    packing = packing_of(model, footprint.plan)
    # Not only when it is asked: a variant that is missing is traced from the start.
    class_model.variant(packing, (device or ANY_MAC).backend)
    workspace = RecordedWorkspace(class_model, model, packing, max(footprint.sizes), traced)
    return Subject(checkpoint, model, footprint, device, Recorded(workspace))
