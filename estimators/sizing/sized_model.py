"""A model on a runtime and a device: every byte it takes at any workload."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import FAMILIES, build_model, dtype_of
from memfit.estimators.base.errors import CheckpointError, MachineError, UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.results.estimate import Basis, Note
from memfit.estimators.runtimes.budget import Need
from memfit.estimators.runtimes.interface import MLX, Figures, RuntimeModel
from memfit.estimators.runtimes.measured import MeasuredEngine
from memfit.estimators.runtimes.mlx_lm_trace import TraceEngine, traced_weights, undescribed_model
from memfit.estimators.runtimes.registry import LLAMA_CPP, MLX_LM, MLX_MOE, Runtime, get_runtime
from memfit.estimators.sizing.workload import MARGIN_BYTES
from memfit.estimators.weights.activations import activation_type
from memfit.estimators.weights.derived import Plan
from memfit.estimators.weights.footprint import (
    WeightFootprint,
    add_adapter,
    convert,
    load_footprint,
)
from memfit.estimators.weights.quantization_plan import declared

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter
    from memfit.estimators.runtimes.foundry import FoundrySettings
    from memfit.estimators.runtimes.llama_cpp.caches import CacheTypes
    from memfit.estimators.runtimes.measurement import Measurement

# How figures are come by: ``auto`` is the formulas where they describe the model, else the trace.
Method = Literal["auto", "formula", "trace"]


@dataclass(slots=True)
class SizedModel:
    """A model ready to be asked about workloads; answers are kept."""

    checkpoint: Checkpoint
    model: Model
    footprint: WeightFootprint
    device: Device | None
    margin_bytes: int
    draft: "SizedModel | None" = None
    engine: RuntimeModel = MLX
    searches: RuntimeModel | None = None  # what many workloads are asked of, when not the engine
    notes: tuple[Note, ...] = ()  # on measurements that were looked for
    _answers: dict[Workload, Figures] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """The device's backend; Metal's rules when no device is given."""
        return self.device.backend if self.device else "metal"

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights as the runtime lays them out in memory."""
        return self.engine.resident_bytes(self.footprint, self.backend)

    def figures_for(self, workload: Workload) -> Figures:
        """Return the figures of a workload.

        Raises:
            UnsupportedError: when the runtime cannot run it, e.g. KV bits on a rotating cache.
        """
        if workload not in self._answers:
            self._answers[workload] = self.engine.figures(
                self.model, self.footprint, workload, self.device
            )
        return self._answers[workload]

    def formula_view(self) -> "SizedModel | None":
        """Return the sizing that is asked of many workloads, None when only a trace could tell."""
        if self.searches:
            return replace(self, engine=self.searches, searches=None, _answers={})
        return None if isinstance(self.engine, TraceEngine | MeasuredEngine) else self

    def requirement(self, workload: Workload) -> Need:
        """Return what must fit: the peak with draft and margin, and the largest allocation."""
        moment = self.figures_for(workload).moment
        peak_bytes = moment.nbytes + self.draft_bytes(workload) + self.margin_bytes
        return Need(peak_bytes, moment.largest_buffer_bytes)

    def workspace_basis(self, workload: Workload) -> tuple[Basis, int]:
        """Return what a workload's workspace rests on, and by how many percent it may be wrong."""
        if isinstance(self.engine, TraceEngine):
            return self.engine.basis_of(workload, self.device)
        return self.engine.workspace_basis

    def on(self, device: Device | None) -> "SizedModel":
        """Return the same model on another device; nothing is read or weighed again."""
        draft = self.draft.on(device) if self.draft else None
        moved = replace(self, device=device, draft=draft, _answers={})
        # mlx-moe keeps as many experts as fit: its weights depend on the machine.
        return moved.with_runtime(get_runtime(self.runtime)) if self._sheds_experts else moved

    def with_runtime(
        self, runtime: Runtime, settings: "FoundrySettings | None" = None
    ) -> "SizedModel":
        """Return the same model under another runtime; ``settings`` are Foundry's.

        Raises:
            UnsupportedError: when the runtime cannot load the checkpoint.
        """
        if runtime.name == self.runtime and not self._sheds_experts and settings is None:
            return self
        if self.formula_view() is None:
            raise UnsupportedError(
                f"{self.checkpoint.id}: only a trace sizes this model, and that for mlx-lm"
            )
        # Most answers need no other runtime.
        from memfit.estimators.runtimes.foundry import FoundrySettings
        from memfit.estimators.runtimes.ruled import engine_under

        engine = engine_under(
            runtime,
            self.engine,
            self.checkpoint,
            self.model,
            self.footprint,
            self.device,
            settings or FoundrySettings(),
        )
        draft = self.draft.with_runtime(runtime, settings) if self.draft else None
        return replace(self, engine=engine, draft=draft, searches=None, _answers={})

    def measured(self, measurement: "Measurement") -> "SizedModel":
        """Return the same with what a run on this device took, in place of figures for it.

        It stays as it is: neither moved to another device nor put under another runtime.
        """
        searching = self.formula_view()
        searches = searching.engine if searching else None
        engine = MeasuredEngine(self.engine, measurement)
        return replace(self, engine=engine, searches=searches, _answers={})

    @property
    def runtime(self) -> str:
        """The name of the runtime it is sized for."""
        return self.engine.runtime

    @property
    def _sheds_experts(self) -> bool:
        return self.engine.runtime == MLX_MOE

    def draft_bytes(self, workload: Workload) -> int:
        """Return the bound of what a draft model adds: its own peak over the same tokens."""
        return self.draft.figures_for(workload).moment.nbytes if self.draft else 0


def native_runtime(checkpoint: Checkpoint) -> str:
    """Return the name of the runtime that a checkpoint is sized for as it is."""
    return LLAMA_CPP if checkpoint.source == "gguf" else MLX_LM


def size(
    checkpoint: Checkpoint,
    *,
    device: Device | None,
    margin_bytes: int = MARGIN_BYTES,
    quantize: Quantization | None = None,
    adapter: "Adapter | None" = None,
    draft: Checkpoint | None = None,
    cache_types: "CacheTypes | None" = None,
    method: Method = "auto",
) -> SizedModel:
    """Return the sizing of a checkpoint, as it is or as mlx_lm.convert would quantise it.

    A GGUF file is sized for llama.cpp, with a cache of ``cache_types``; all else for mlx-lm.

    Raises:
        CheckpointError: when there is no config to read the architecture from.
        ConfigError: when the config is malformed.
        UnsupportedError: when the architecture or the weights' format is not described.
    """
    drafted = size(draft, device=device) if draft else None
    if native_runtime(checkpoint) == LLAMA_CPP:
        if quantize or adapter:
            what = "conversions" if quantize else "adapters"
            raise UnsupportedError(f"{checkpoint.id}: {what} of a GGUF file are not described")
        sized = _size_gguf(checkpoint, device, margin_bytes, cache_types)
        return _drafting(sized, drafted)
    if cache_types:
        raise UnsupportedError(
            f"{checkpoint.id}: the types of a cache are llama.cpp's; mlx-lm takes KV bits"
        )
    try:
        model = _model_of(checkpoint)
    except UnsupportedError as error:
        # A key nobody reads is for the user to judge; an unknown type goes to the trace unasked.
        known = checkpoint.config.get("model_type") in FAMILIES
        if method == "formula" or (known and method == "auto"):
            raise
        sized = _size_by_trace(checkpoint, device, margin_bytes, quantize, error)
        return _drafting(sized, drafted)
    block = declared(checkpoint.config, model, checkpoint.config_name)
    if quantize:
        footprint = convert(model, Plan(quantize, converting=True), block)
    else:
        footprint = load_footprint(checkpoint, model, block)
    sized = SizedModel(checkpoint, model, footprint, device, margin_bytes)
    if method == "trace":
        engine = TraceEngine(checkpoint, quantize, model.dtype, described=True)
        footprint = traced_weights(engine, footprint, device)
        sized = replace(sized, footprint=footprint, engine=engine, searches=MLX)
    if adapter:
        sized = replace(sized, footprint=add_adapter(footprint, adapter.tensors))
    return _drafting(sized, drafted)


def _size_by_trace(
    checkpoint: Checkpoint,
    device: Device | None,
    margin_bytes: int,
    quantize: Quantization | None,
    undescribed: UnsupportedError,
) -> SizedModel:
    """A model that the formulas do not describe, if mlx-lm has a class for it."""
    dtype = dtype_of(Fields(checkpoint.config, checkpoint.config_name), checkpoint.config_name)
    engine = TraceEngine(checkpoint, quantize, dtype, described=False)
    try:
        footprint = traced_weights(engine, None, device)
    except (MachineError, UnsupportedError) as error:
        raise UnsupportedError(f"{undescribed}; by trace: {error}") from None
    model = undescribed_model(checkpoint, dtype)
    return SizedModel(checkpoint, model, footprint, device, margin_bytes, engine=engine)


def _size_gguf(
    checkpoint: Checkpoint,
    device: Device | None,
    margin_bytes: int,
    cache_types: "CacheTypes | None",
) -> SizedModel:
    # Tables and rules of llama.cpp, which no other checkpoint needs.
    from memfit.estimators.arch.gguf.model import build_gguf_model
    from memfit.estimators.runtimes.llama_cpp.runtime import LlamaEngine
    from memfit.estimators.weights.ggml import gguf_footprint

    tensors = checkpoint.tensors or ()
    try:
        model, trunk = build_gguf_model(checkpoint.config, tensors, checkpoint.config_name)
    except UnsupportedError as error:
        known = _known_bytes(checkpoint)
        raise UnsupportedError(f"{error}; its weights hold {known} bytes (exact)") from None
    footprint = gguf_footprint(tensors, trunk)
    engine = LlamaEngine(tensors, cache_types)
    return SizedModel(checkpoint, model, footprint, device, margin_bytes, engine=engine)


def _drafting(sized: SizedModel, draft: SizedModel | None) -> SizedModel:
    """The same with a draft model, which must run on the same runtime."""
    if draft and draft.engine.runtime != sized.engine.runtime:
        raise UnsupportedError(
            f"{draft.checkpoint.id}: a draft for {draft.engine.runtime} cannot serve a model that"
            f" runs on {sized.engine.runtime}"
        )
    return replace(sized, draft=draft)


def _model_of(checkpoint: Checkpoint) -> Model:
    if not checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.id}: its config is missing or empty; its {_known_bytes(checkpoint)}"
            " bytes of tensors are exact, caches and workspace need a config.json beside it"
        )
    try:
        model = build_model(checkpoint.config, checkpoint.config_name)
    except UnsupportedError as error:
        if checkpoint.tensors is None:
            raise
        known = _known_bytes(checkpoint)
        raise UnsupportedError(f"{error}; its weights hold {known} bytes (exact)") from None
    block = declared(checkpoint.config, model, checkpoint.config_name)
    dtype = activation_type(checkpoint, model, block)
    return replace(model, dtype=dtype) if dtype != model.dtype else model


def _known_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.tensors or ())
