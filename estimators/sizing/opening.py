"""A checkpoint made into a sized model: as it is, converted, or as its class describes it."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import FAMILIES, build_model, dtype_of
from memfit.estimators.base import dtypes
from memfit.estimators.base.dtypes import Quantization, converted
from memfit.estimators.base.errors import (
    CheckpointError,
    MachineError,
    UnknownArchitectureError,
    UnsupportedError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MlxVersions, as_of, check_class
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Level
from memfit.estimators.runtimes.facets import MlxLmPrograms, OnMlx
from memfit.estimators.runtimes.interface import RuntimeModel, Subject
from memfit.estimators.runtimes.registry import (
    bind,
    class_of,
    native_runtime,
    offers,
    with_versions,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import Interpolated, MethodSetting, Recorded
from memfit.estimators.sizing.sized_model import (
    SizedModel,
    refusal_of,
    require_head_drafting,
)
from memfit.estimators.sizing.unknown import require_language_model, unknown_architecture
from memfit.estimators.weights.activations import activation_type
from memfit.estimators.weights.conversion import conversion_type, convert
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.weights.footprint import WeightFootprint, load_footprint
from memfit.estimators.weights.quantization_plan import declared
from memfit.estimators.weights.sanitize import with_own_head

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter

# Of mlx_lm.convert, most first; 2 bits make most models useless.
WEIGHT_BITS = (8, 6, 5, 4)


# Of mlx_lm.convert, most first; 2 bits make most models useless.
WEIGHT_BITS = (8, 6, 5, 4)


def weight_bits_of(sized: SizedModel) -> tuple[int, ...]:
    """Return the bits of mlx_lm.convert that are fewer than the weights have, most first."""
    plan, checkpoint = sized.footprint.plan, sized.checkpoint
    # mlx_lm.convert loads what it converts.
    is_converted = sized.runtime_model.facet(OnMlx) and checkpoint.source != "gguf"
    if refusal_of(sized) or not is_converted:
        return ()
    if plan is None or not plan.converting:
        block = declared(checkpoint.config, sized.model, checkpoint.config_name)
        if plan or not block.is_plain:
            return ()
    now = plan.default.bits if plan else dtypes.BITS[sized.model.dtype]
    return tuple(bits for bits in WEIGHT_BITS if bits < now)


def with_weight_bits(sized: SizedModel, bits: int) -> SizedModel:
    """Return the same model after conversion by mlx_lm.convert, sized by formula.

    Where no formula has its workspace, that is between traces of the converted class.

    Raises:
        UnsupportedError: when its class asks for groups that do not divide a matrix.
    """
    view, checkpoint = sized.formula_view(), sized.checkpoint
    block = declared(checkpoint.config, sized.model, checkpoint.config_name)
    quantize = converted(bits)
    plan = QuantizationPlan(quantize, converting=True)
    before = sized.footprint
    stored = before.converted_from or before.loaded
    model, footprint = convert(checkpoint.config, sized.model, plan, block, stored)
    footprint = replace(footprint, converter_reads=before.converter_reads or before.conversions)
    subject = view.runtime_model.subject
    _, footprint = _with_adapter(model, footprint, subject.adapter)
    source = subject.source
    if isinstance(source, Recorded):
        source = Recorded(source.workspace.converted(quantize))
    elif isinstance(source, Interpolated):
        source = Interpolated(source.workspace.converted(quantize))
    subject = replace(subject, model=model, footprint=footprint, source=source, method="formula")
    return view._under(bind(view.runtime_model.runtime, subject))


def size(
    checkpoint: Checkpoint,
    *,
    device: Device | None,
    margin_bytes: int = MARGIN_BYTES,
    quantize: Quantization | None = None,
    adapter: "Adapter | None" = None,
    method: MethodSetting = "auto",
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
    require_language_model(checkpoint, device)
    if checkpoint.source == "gguf":
        if quantize or adapter:
            what = "conversions" if quantize else "adapters"
            raise UnsupportedError(f"{checkpoint.id}: {what} of a GGUF file are not described")
        runtime_model = _size_gguf(checkpoint, device)
    else:
        runtime_model = _size_safetensors(checkpoint, device, quantize, adapter, method, versions)
    return SizedModel(runtime_model, margin_bytes)


def size_head(head: Checkpoint, device: Device | None, runtime: Runtime) -> SizedModel:
    """Return prediction layers sized as a draft model; `prediction_head` is what they are made of.

    Raises:
        MemfitError: as `size`; also for FP8, which mlx-vlm makes another format of.
    """
    from memfit.estimators.arch.families.qwen3_next import mtp_head

    require_head_drafting(runtime, head)
    fields = config_fields(head.config, head.config_name)
    model = replace(mtp_head(fields), dtype=dtype_of(fields, head.config_name))
    block = declared(head.config, model, head.config_name)
    if block.method == "fp8":
        raise UnsupportedError(
            f"{head.id}: MTP layers in FP8 are not described; split them with python -m"
            " mlx_vlm.split_mtp, and name what it writes"
        )
    model = replace(model, dtype=activation_type(head, model, block))
    footprint = load_footprint(head, model, block)
    return SizedModel(bind(runtime, Subject(head, model, footprint, device)))


def _assumed(checkpoint: Checkpoint, as_type: str) -> Checkpoint:
    """The checkpoint with another model type in its config."""
    if checkpoint.source == "gguf":
        raise UnsupportedError(
            f"{checkpoint.id}: a GGUF file says what it is; another type is not described for it"
        )
    # A type in the user's words stands above the class that the config names.
    config = {**checkpoint.config, "model_type": as_type, "architectures": []}
    own = checkpoint.config.get("model_type")
    return replace(checkpoint, config=config, assumed_from=printable(own or "no model_type"))


def _size_safetensors(
    checkpoint: Checkpoint,
    device: Device | None,
    quantize: Quantization | None,
    adapter: "Adapter | None",
    method: MethodSetting,
    versions: MlxVersions,
) -> RuntimeModel:
    native = native_runtime(checkpoint)
    runtime = with_versions(native, mlx=versions.mlx, mlx_lm=versions.mlx_lm, strict=False)
    try:
        model = as_of(_model_of(checkpoint, device), versions)
    except UnsupportedError as error:
        if method == "auto" and adapter is None:
            recorded = _size_recorded(checkpoint, device, quantize, error, runtime)
            if recorded:
                return recorded
        if method == "formula":
            raise
        return _size_by_class(checkpoint, device, quantize, adapter, error, runtime)
    block = declared(checkpoint.config, model, checkpoint.config_name)
    footprint = load_footprint(checkpoint, model, block)
    if quantize:
        plan, before = QuantizationPlan(quantize, converting=True), footprint
        model, footprint = convert(checkpoint.config, model, plan, block, before.loaded)
        # Of a quantised checkpoint the original is converted, which is not what was read.
        refusal = "" if footprint.of_original else before.refusal
        footprint = replace(footprint, refusal=refusal, converter_reads=before.conversions)
    if method != "trace" or not offers(runtime, MlxLmPrograms):
        model, footprint = _with_adapter(model, footprint, adapter)
        subject = Subject(checkpoint, model, footprint, device, method=method, adapter=adapter)
        return bind(runtime, subject)
    from memfit.estimators.runtimes.mlx_lm_trace import ClassTrace, MlxLmTrace, traced_weights

    trace = ClassTrace(checkpoint, quantize, model.dtype, adapter=adapter)
    footprint = traced_weights(trace, footprint, device)
    model, footprint = _with_adapter(model, footprint, adapter)
    subject = Subject(checkpoint, model, footprint, device, method="trace", adapter=adapter)
    return MlxLmTrace(runtime, subject, trace)


def _size_recorded(
    checkpoint: Checkpoint,
    device: Device | None,
    quantize: Quantization | None,
    undescribed: UnsupportedError,
    runtime: Runtime,
) -> RuntimeModel | None:
    """A model that no family describes, by the recorded graphs of its class, None without them."""
    from memfit.estimators.programs.library import find

    model_type = str(checkpoint.config.get("model_type"))
    recorded = find(model_type) if offers(runtime, MlxLmPrograms) else None
    # Of another version the class may be another: a trace says which one it runs.
    if recorded is None or runtime.versions.mlx_lm != recorded.mlx_lm:
        return None
    from memfit.estimators.runtimes.recorded import recorded_subject

    check_class(model_type, runtime.versions.mlx_lm)
    subject = recorded_subject(checkpoint, quantize, device)
    if subject is None:
        return None
    return bind(
        runtime, _with_own_class(subject, undescribed, runtime, "whose graphs are recorded")
    )


def _with_own_class(
    subject: Subject, undescribed: UnsupportedError, runtime: Runtime, how: str
) -> Subject:
    """Return a subject with the note that its runtime's class describes it."""
    config, name = subject.checkpoint.config, runtime.name
    reason, _, _ = str(undescribed).partition(";")
    text = f"{reason}; it is described by {name}'s own class, {how}"
    # A known type has a key that no family reads: the class may ignore it too.
    level: Level = "warning" if config.get("model_type") in FAMILIES else "info"
    notes = (*subject.footprint.notes, Note(level, "own-class", text))
    return replace(subject, footprint=replace(subject.footprint, notes=notes))


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
    if adapter and not offers(runtime, MlxLmPrograms):
        raise UnsupportedError(f"{checkpoint.id}: adapters of {runtime.name} are not described")
    trace = kind.class_trace(checkpoint, quantize, dtype, adapter=adapter)
    try:
        subject = described_by_class(trace, device)
    except (MachineError, UnsupportedError) as error:
        if isinstance(undescribed, UnknownArchitectureError):
            raise undescribed.after_trace(f"by trace: {error}") from None
        raise UnsupportedError(f"{undescribed}; by trace: {error}") from None
    how = f"and {runtime.name}'s figures are by trace"
    subject = _with_own_class(subject, undescribed, runtime, how)
    model, footprint = _with_adapter(subject.model, subject.footprint, adapter)
    subject = replace(subject, model=model, footprint=footprint, adapter=adapter)
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
