"""A model on a runtime and a device: every byte it takes at any workload."""

from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import FAMILIES, build_model, dtype_of
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import (
    CheckpointError,
    DoesNotLoadError,
    MachineError,
    UnknownArchitectureError,
    UnsupportedError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.base.quantization import Quantization, converted
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.other_kinds import kind_of_config
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.as_of import as_of, check_class
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.questions.model import DRAFT_TOKENS
from memfit.estimators.questions.runtime import MARGIN_BYTES, Method
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis, Level, LimitName, Verdict
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.runtimes.interface import DraftFigures, MemoryFigures, RuntimeModel, Subject
from memfit.estimators.runtimes.registry import (
    bind,
    class_of,
    get_runtime,
    native_runtime,
    runtime_names,
    with_versions,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.unknown import unknown_architecture
from memfit.estimators.weights.activations import activation_type
from memfit.estimators.weights.conversion import conversion_type, convert
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.weights.footprint import WeightFootprint, load_footprint
from memfit.estimators.weights.quantization_plan import declared
from memfit.estimators.weights.sanitize_names import with_own_head

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter
    from memfit.estimators.runtimes.measurement import Measurement

# Of mlx_lm.convert, most first; 2 bits make most models useless.
WEIGHT_BITS = (8, 6, 5, 4)
# How figures are computed: ``auto`` is the formulas where they describe the model, else the trace.


class SizedModel(Struct):
    """A model ready for questions about workloads; answers are kept."""

    runtime_model: RuntimeModel
    margin_bytes: int = MARGIN_BYTES
    draft: "SizedModel | None" = None
    draft_tokens: int = DRAFT_TOKENS
    """The tokens that the draft model proposes in each step."""
    notes: tuple[Note, ...] = ()
    """On measurements that were looked for."""
    adapter: "Adapter | None" = None
    _answers: dict[Workload, MemoryFigures] = field(default_factory=dict)
    _drafts: dict[Workload, DraftFigures] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that was opened."""
        return self.runtime_model.subject.checkpoint

    @property
    def model(self) -> Model:
        return self.runtime_model.subject.model

    @property
    def footprint(self) -> WeightFootprint:
        return self.runtime_model.subject.footprint

    @property
    def device(self) -> Device | None:
        """The machine, None where none was named."""
        return self.runtime_model.subject.device

    @property
    def refusal(self) -> str:
        """Why the runtime does not load the checkpoint, or its draft model's; else empty."""
        if self.draft and self.draft.refusal and not self.runtime_model.refusal:
            return f"the draft model {self.draft.checkpoint.id}: {self.draft.refusal}"
        return self.runtime_model.refusal

    @property
    def is_foreign(self) -> bool:
        """Whether its files are in a format of another program: figures are of a conversion."""
        return self.footprint.of_original or self.checkpoint.weight_bytes_bound is not None

    @property
    def is_loadable(self) -> bool:
        """Whether the library loads the checkpoint, or its program converts it, as it is."""
        return not (self.refusal or self.footprint.of_original)

    def loaded(self) -> "SizedModel":
        """Return the same model, which the runtime loads.

        Raises:
            DoesNotLoadError: when it does not.
        """
        if not self.refusal:
            return self
        others = "".join(f"; {name} loads it" for name in self.loaded_by())
        raise DoesNotLoadError(
            f"{self.checkpoint.id}: {self.runtime} does not load it: {self.refusal}{others}"
        )

    def loaded_by(self) -> tuple[str, ...]:
        """Return the runtimes that are known to load a checkpoint that this one does not."""
        return tuple(filter(self._is_loaded_by, runtime_names()))

    def _is_loaded_by(self, name: str) -> bool:
        try:
            other = bind(get_runtime(name), self.runtime_model.subject)
        except UnsupportedError:
            return False
        if other.on_mlx and self.checkpoint.has_other_names:
            # The rules of all image processors, for a question that few models have.
            from memfit.estimators.images.processor import has_tower

            # Classes of mlx-vlm are of models with towers.
            return not other.refusal and (not other.takes_images or has_tower(self.checkpoint))
        return self.is_foreign and other.loads_foreign_formats

    def verdict(self, workload: Workload) -> tuple[Verdict, tuple[LimitName, ...]]:
        """Return the verdict on a workload, and the limits that are exceeded."""
        if self.refusal:
            return "does_not_load", ()
        return judge(self.requirement(workload), self.device)

    @property
    def runtime(self) -> str:
        """The name of the runtime it is sized for."""
        return self.runtime_model.name

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights as the runtime lays them out in memory."""
        return self.runtime_model.resident_bytes

    def figures_for(self, workload: Workload) -> MemoryFigures:
        """Return the figures of a workload.

        Raises:
            UnsupportedError: when the runtime cannot run it, e.g. KV bits on a rotating cache.
        """
        if workload not in self._answers:
            self.require_images(workload)
            self._answers[workload] = self.runtime_model.figures(workload)
        return self._answers[workload]

    def require_images(self, workload: Workload) -> None:
        """Check that the runtime's figures include the images of a workload, if it has any.

        Raises:
            UnsupportedError: when they do not.
        """
        if workload.images and not self.runtime_model.takes_images:
            raise UnsupportedError(
                f"{self.runtime}: what it does with images is not described; leave the runtime out,"
                " or take mlx-vlm"
            )

    def is_known(self, workload: Workload) -> bool:
        """Whether the figures of a workload were computed already."""
        return workload in self._answers

    @property
    def is_between_traces(self) -> bool:
        """Whether its workspace is between those of traced prompts: no formula has one."""
        runtime_model = self.runtime_model
        return runtime_model.method != "trace" and runtime_model.subject.traced is not None

    def formula_view(self) -> "SizedModel":
        """Return what answers many workloads quickly."""
        view = self.runtime_model.formula_view()
        return self if view is self.runtime_model else self._under(view)

    def phases_view(self, phases: frozenset[CallPhase]) -> "SizedModel":
        """Return what may leave out the calls of other phases, if that is quicker."""
        return self._under(self.runtime_model.phases_view(phases))

    def comparing(self, *workloads: Workload) -> "SizedModel":
        """Return what answers for all these workloads in one way, so that peaks compare."""
        view = self.runtime_model.comparing(*workloads)
        return self if view is self.runtime_model else self._under(view)

    def requirement(self, workload: Workload) -> Need:
        """Return what must fit, and the budget that it must fit in."""
        figures, runtime_model = self.figures_for(workload), self.runtime_model
        draft, budget = self.draft_bytes(workload), runtime_model.runtime.budget
        drafted = self.drafted(workload)
        on_host = figures.host_bytes + (drafted.host_bytes if drafted else 0)
        return Need(
            figures.moment.nbytes + draft + self.margin_bytes,
            figures.moment.largest_buffer_bytes,
            runtime_model.budgeted_bytes(figures) + (0 if budget.for_cache else draft),
            budget,
            self.error_bytes(workload),
            runtime_model.shared_bytes(figures),
            max(0, workload.total_tokens - (runtime_model.context_limit or workload.total_tokens)),
            runtime_model.host_need(on_host),
        )

    def workspace_basis(self, workload: Workload) -> tuple[Basis, int]:
        """Return what a workload's workspace rests on, and by how many percent it may be wrong."""
        return self.runtime_model.basis("workspace", workload)

    def error_bytes(self, workload: Workload) -> int:
        """Return by how much the peak may be too low: the error of its workspace, or a load."""
        above_peak = self.runtime_model.most_load_bytes - self.figures_for(workload).moment.nbytes
        return max(self.workspace_error_bytes(workload), above_peak)

    def workspace_error_bytes(self, workload: Workload) -> int:
        """Return by how much the peak may be wrong: the stated error of its workspace.

        With a draft model the workspace of the largest moment of both counts: it can be the
        draft's, or in a chunk of the target that finds its own caches small. At least a batch of
        work, which may have run already or not yet when the peak is reached.
        """
        moment, percent = self.figures_for(workload).moment, self.workspace_basis(workload)[1]
        drafted = self.drafted(workload)
        workspace = max(moment.workspace_bytes, drafted.workspace_bytes if drafted else 0)
        stated = ceil_div(workspace * percent, 100)
        return max(stated, moment.batch_bytes) if percent else stated

    def on(self, device: Device | None) -> "SizedModel":
        """Return the same model on another device; nothing is read again."""
        draft = self.draft.on(device) if self.draft else None
        answers = self._answers if self.runtime_model.is_alike_on(device) else {}
        runtime_model = self.runtime_model.on(device)
        return replace(self, runtime_model=runtime_model, draft=draft, _answers=answers, _drafts={})

    def with_runtime(self, runtime: Runtime) -> "SizedModel":
        """Return the same model under another runtime, or one with other settings.

        Raises:
            UnsupportedError: when the runtime cannot load the checkpoint.
        """
        if runtime == self.runtime_model.runtime:
            return self
        draft = self.draft.with_runtime(runtime) if self.draft else None
        return replace(self._under(bind(runtime, self.runtime_model.subject)), draft=draft)

    def of_rank(self, rank: Rank) -> "SizedModel":
        """Return the part of one of several ranks; its margin includes what ranks exchange in.

        Raises:
            InputError: for a split that is not of the model's layers.
            UnsupportedError: when the model does not divide among the ranks.
        """
        ranked = self.runtime_model.of_rank(rank)
        margin_bytes = self.margin_bytes + ranked.communication_bytes
        return replace(self._under(ranked), margin_bytes=margin_bytes)

    def settled(self, workload: Workload) -> "SizedModel":
        """Return the same with the settings that its runtime chooses by a workload.

        Raises:
            UnsupportedError: when it cannot choose.
        """
        return self.with_runtime(self.runtime_model.settled(workload))

    def with_footprint(self, footprint: WeightFootprint) -> "SizedModel":
        """Return the same model with other weights."""
        return self._of(replace(self.runtime_model.subject, footprint=footprint))

    def _of(self, subject: Subject) -> "SizedModel":
        return self._under(type(self.runtime_model).bound(self.runtime_model.runtime, subject))

    def weight_bits(self) -> tuple[int, ...]:
        """Return the bits of mlx_lm.convert that are fewer than the weights have, most first."""
        plan, checkpoint = self.footprint.plan, self.checkpoint
        # mlx_lm.convert loads what it converts.
        if self.refusal or not self.runtime_model.on_mlx or checkpoint.source == "gguf":
            return ()
        if plan is None or not plan.converting:
            block = declared(checkpoint.config, self.model, checkpoint.config_name)
            if plan or not block.is_plain:
                return ()
        now = plan.default.bits if plan else dtypes.BITS[self.model.dtype]
        return tuple(bits for bits in WEIGHT_BITS if bits < now)

    def converted(self, bits: int) -> "SizedModel":
        """Return the same model after conversion by mlx_lm.convert, sized by formula.

        Where no formula has its workspace, that is between traces of the converted class.

        Raises:
            UnsupportedError: when its class asks for groups that do not divide a matrix.
        """
        model, checkpoint = self.model, self.checkpoint
        block = declared(checkpoint.config, model, checkpoint.config_name)
        quantize = converted(bits)
        plan = QuantizationPlan(quantize, converting=True)
        stored = self.footprint.converted_from or self.footprint.loaded
        model, footprint = convert(checkpoint.config, model, plan, block, stored)
        _, footprint = _with_adapter(model, footprint, self.adapter)
        view = self.formula_view()
        subject = replace(view.runtime_model.subject, model=model, footprint=footprint)
        if subject.traced:
            subject = replace(subject, traced=subject.traced.converted(quantize))
        return view._of(subject)

    def measured(self, measurement: "Measurement") -> "SizedModel":
        """Return the same with what a run on this device took, in place of figures for it.

        It stays as it is: neither moved to another device nor put under another runtime.
        """
        from memfit.estimators.runtimes.measured import Measured

        inner = self.runtime_model
        return self._under(Measured(inner.runtime, inner.subject, inner, measurement))

    def _under(self, runtime_model: RuntimeModel) -> "SizedModel":
        return replace(self, runtime_model=runtime_model, _answers={}, _drafts={})

    def drafting(self, draft: "SizedModel", tokens: int) -> "SizedModel":
        """Return the same with a draft model that proposes ``tokens`` in each step.

        Raises:
            UnsupportedError: for a model of another runtime, or under mlx-lm with another
                vocabulary.
        """
        if draft.runtime != self.runtime:
            raise UnsupportedError(
                f"{draft.checkpoint.id}: a draft for {draft.runtime} cannot serve a model that"
                f" runs on {self.runtime}"
            )
        if self.runtime_model.is_mlx_lm:
            from memfit.estimators.sizing.drafting import require_same_vocabulary

            require_same_vocabulary(self.runtime_model.subject, draft.runtime_model.subject)
        return replace(self, draft=draft, draft_tokens=tokens, _drafts={})

    def draft_bytes(self, workload: Workload) -> int:
        """Return what a draft model adds to the peak, 0 without one."""
        drafted = self.drafted(workload)
        return drafted.nbytes if drafted else 0

    def drafted(self, workload: Workload) -> DraftFigures | None:
        """Return what a draft model adds, None without one.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        if self.draft is None:
            return None
        if workload not in self._drafts:
            self._drafts[workload] = self.runtime_model.drafted(
                workload, self.draft.runtime_model, self.draft_tokens
            )
        return self._drafts[workload]


def size(
    checkpoint: Checkpoint,
    *,
    device: Device | None,
    margin_bytes: int = MARGIN_BYTES,
    quantize: Quantization | None = None,
    adapter: "Adapter | None" = None,
    method: Method = "auto",
    as_type: str | None = None,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
) -> SizedModel:
    """Return a checkpoint sized for its own runtime, as it is or as mlx_lm.convert quantises it.

    A GGUF file is sized for llama.cpp; all else for mlx-lm, as it is in ``versions``. ``as_type``
    is the model type to assume in place of the config's own.

    Raises:
        CheckpointError: when there is no config to read the architecture from.
        ConfigError: when the config is malformed.
        UnsupportedError: when the architecture or the weights' format is not described.
    """
    if as_type:
        checkpoint = _assumed(checkpoint, as_type)
    elif kind := checkpoint.other_kind or kind_of_config(checkpoint.config):
        raise UnsupportedError(f"{checkpoint.config_name}: {kind}, not a language model")
    if checkpoint.source == "gguf":
        if quantize or adapter:
            what = "conversions" if quantize else "adapters"
            raise UnsupportedError(f"{checkpoint.id}: {what} of a GGUF file are not described")
        runtime_model = _size_gguf(checkpoint, device)
    else:
        runtime_model = _size_safetensors(checkpoint, device, quantize, adapter, method, versions)
    return SizedModel(runtime_model, margin_bytes, adapter=adapter)


def _assumed(checkpoint: Checkpoint, as_type: str) -> Checkpoint:
    """The checkpoint with another model type in its config."""
    if checkpoint.source == "gguf":
        raise UnsupportedError(
            f"{checkpoint.id}: a GGUF file says what it is; another type is not described for it"
        )
    config, own = {**checkpoint.config, "model_type": as_type}, checkpoint.config.get("model_type")
    return replace(checkpoint, config=config, assumed_from=printable(own or "no model_type"))


def _size_safetensors(
    checkpoint: Checkpoint,
    device: Device | None,
    quantize: Quantization | None,
    adapter: "Adapter | None",
    method: Method,
    versions: MlxVersions,
) -> RuntimeModel:
    native = native_runtime(checkpoint)
    runtime = with_versions(native, mlx=versions.mlx, mlx_lm=versions.mlx_lm, strict=False)
    try:
        model = as_of(_model_of(checkpoint, device), versions)
    except UnsupportedError as error:
        if method == "formula":
            raise
        return _size_by_class(checkpoint, device, quantize, adapter, error, runtime)
    block = declared(checkpoint.config, model, checkpoint.config_name)
    footprint = load_footprint(checkpoint, model, block)
    if quantize:
        plan, refusal = QuantizationPlan(quantize, converting=True), footprint.refusal
        model, footprint = convert(checkpoint.config, model, plan, block, footprint.loaded)
        # Of a quantised checkpoint the original is converted, which is not what was read.
        footprint = replace(footprint, refusal="" if footprint.of_original else refusal)
    if method != "trace" or not class_of(runtime).is_mlx_lm:
        model, footprint = _with_adapter(model, footprint, adapter)
        by_trace = None if method == "auto" else method == "trace"
        return bind(runtime, Subject(checkpoint, model, footprint, device, by_trace=by_trace))
    from memfit.estimators.runtimes.mlx_lm_trace import ClassTrace, MlxLmTrace, traced_weights

    trace = ClassTrace(checkpoint, quantize, model.dtype, is_described=True, adapter=adapter)
    footprint = traced_weights(trace, footprint, device)
    model, footprint = _with_adapter(model, footprint, adapter)
    subject = Subject(checkpoint, model, footprint, device, by_trace=True)
    return MlxLmTrace(runtime, subject, trace)


def _size_by_class(
    checkpoint: Checkpoint,
    device: Device | None,
    quantize: Quantization | None,
    adapter: "Adapter | None",
    undescribed: UnsupportedError,
    runtime: Runtime,
) -> RuntimeModel:
    """A model that no family describes, as its runtime's own class describes it."""
    from memfit.estimators.runtimes.by_class import described_by_class

    config, name = checkpoint.config, checkpoint.config_name
    check_class(str(config.get("model_type")), runtime.versions.mlx_lm)
    dtype = dtype_of(config_fields(config, name), name)
    if quantize:
        dtype = conversion_type(config) or dtype
    kind = class_of(runtime)
    trace = kind.class_trace(checkpoint, quantize, dtype, adapter)
    try:
        subject = described_by_class(trace, device)
    except (MachineError, UnsupportedError) as error:
        if isinstance(undescribed, UnknownArchitectureError):
            raise undescribed.after_trace(f"by trace: {error}") from None
        raise UnsupportedError(f"{undescribed}; by trace: {error}") from None
    reason, _, _ = str(undescribed).partition(";")
    name = runtime.name
    text = f"{reason}; it is described by {name}'s own class, and {name}'s figures are by trace"
    # A known type has a key that no family reads: the class may ignore it too.
    level: Level = "warning" if config.get("model_type") in FAMILIES else "info"
    notes = (*subject.footprint.notes, Note(level, "own-class", text))
    footprint = replace(subject.footprint, notes=notes)
    model, footprint = _with_adapter(subject.model, footprint, adapter)
    subject = replace(subject, model=model, footprint=footprint)
    made: RuntimeModel = kind.of_class(runtime, subject, trace)
    return made


def _with_adapter(
    model: Model, footprint: WeightFootprint, adapter: "Adapter | None"
) -> tuple[Model, WeightFootprint]:
    if adapter is None:
        return model, footprint
    from memfit.estimators.weights.adapters import with_adapter

    return with_adapter(model, footprint, adapter)


def _size_gguf(checkpoint: Checkpoint, device: Device | None) -> RuntimeModel:
    # Tables and rules of llama.cpp, which no other checkpoint needs.
    from memfit.estimators.arch.gguf.model import build_gguf_model
    from memfit.estimators.arch.gguf.tensors import require_tensors
    from memfit.estimators.weights.ggml import gguf_footprint

    tensors = checkpoint.tensors or ()
    try:
        model, trunk = build_gguf_model(checkpoint.config, tensors, checkpoint.config_name)
    except UnsupportedError as error:
        known = _known_bytes(checkpoint)
        raise UnsupportedError(f"{error}; its weights hold {known} bytes (exact)") from None
    require_tensors(checkpoint.config, tensors, model, trunk, checkpoint.config_name)
    subject = Subject(checkpoint, model, gguf_footprint(tensors, trunk), device)
    return bind(native_runtime(checkpoint), subject)


def _model_of(checkpoint: Checkpoint, device: Device | None) -> Model:
    if not checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.id}: its config is missing or empty; its {_known_bytes(checkpoint)}"
            " bytes of tensors are exact, caches and workspace need a config.json next to it"
        )
    try:
        assumed = checkpoint.assumed_from is not None
        model = build_model(checkpoint.config, checkpoint.config_name, assumed=assumed)
    except UnsupportedError as error:
        raise unknown_architecture(checkpoint, error, device) from None
    model = with_own_head(model, checkpoint.tensors)
    block = declared(checkpoint.config, model, checkpoint.config_name)
    dtype = activation_type(checkpoint, model, block)
    return replace(model, dtype=dtype) if dtype != model.dtype else model


def _known_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.tensors or ())
