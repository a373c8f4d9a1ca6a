"""The quantisation a config declares, as mlx-lm reads it when it loads."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module, Part
from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.base.dtypes import DEFAULTS, Quantization
from memfit.estimators.base.errors import ConfigError, InputError
from memfit.estimators.weights.derived import QuantizationPlan


class Declared(Struct, frozen=True):
    """The format of the weights as a config declares it."""

    method: str | None = None
    """None for plain weights, ``mlx`` for MLX's own block, otherwise ``quant_method``."""
    quantises: Quantization | None = None
    """The format mlx-lm expects of quantised tensors, None where it accepts none."""
    plan: QuantizationPlan | None = None
    """How the weights are kept once loaded, as far as the config says; None: not quantised."""
    bound: str | None = None
    """Why the plan is only an upper bound, unless the headers say more."""
    bits: int = 4
    """Bits of the method's own packing."""

    @property
    def is_plain(self) -> bool:
        """Whether mlx-lm holds plain weights: they are, or it dequantises them while loading."""
        return self.method is None or not (self.quantises or self.plan or self.bound)


def declared(config: Mapping[str, Any], model: Model, name: str) -> Declared:
    """Return the format a config declares, by the rules of mlx-lm utils.py, load_model.

    Raises:
        ConfigError: when the block is malformed.
    """
    # mlx_lm.convert writes both keys; load_model reads this one first.
    block = config.get("quantization")
    if block is not None:
        return _mlx(_mapping(block, name, "quantization"), name, "quantization")
    block = foreign_block(config)
    if not block:
        return Declared()
    block = _mapping(block, name, "quantization_config")
    # load_model looks for quant_method in this block, and fails without.
    if "quant_method" not in block and "bits" in block:
        why = "quantization_config without quant_method: mlx-lm loads MLX's formats by quantization"
        return replace(_mlx(block, name, "quantization_config"), quantises=None, bound=why)
    return _foreign(block, model, name, text_class(config, model))


def foreign_block(config: Mapping[str, Any]) -> Any:
    """Return what declares a format that is not MLX's, None where nothing does."""
    text = config.get("text_config")
    # load_model takes the block of text_config too (mlx-lm utils.py).
    if "quantization_config" not in config and isinstance(text, Mapping):
        return text.get("quantization_config")
    return config.get("quantization_config")


def _mapping(value: Any, name: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: {key}: expected an object, got {type(value).__name__}")
    return value


def _mlx(block: Mapping[str, Any], name: str, key: str) -> Declared:
    for part in ("bits", "group_size"):
        if block.get(part) is None:
            raise ConfigError(f"{name}: {key}.{part}: expected an integer, found none")
    default = _format(block, name, key)
    overrides: dict[str, Quantization | None] = {}
    for path, value in block.items():
        # MLX's nn.quantize leaves a module alone for null as it does for false.
        if value is None or isinstance(value, bool):
            overrides[path] = default if value else None
        # By path: settings of one layer, as mixed quantisations have them.
        elif isinstance(value, Mapping):
            # An empty object is false to MLX, and what it does not name is its mode's default.
            overrides[path] = _format(value, name, f"{key}.{path}") if value else None
        elif "." in path:
            raise ConfigError(
                f"{name}: {key}.{path}: expected an object, true or false, got {value!r:.40}"
            )
    plan = QuantizationPlan(default, overrides)
    return Declared("mlx", default, plan, bits=default.bits)


def _format(block: Mapping[str, Any], name: str, key: str) -> Quantization:
    """Source of the defaults: mlx nn/layers/quantized.py, _defaults_for_mode."""
    mode = block.get("mode", "affine")
    if not isinstance(mode, str):
        raise ConfigError(f"{name}: {key}.mode: expected a string, got {mode!r:.40}")
    bits, group_size = DEFAULTS.get(mode, (0, 0))
    bits = _integer(block.get("bits", bits), f"{name}: {key}.bits")
    group_size = _integer(block.get("group_size", group_size), f"{name}: {key}.group_size")
    try:
        return Quantization(bits, group_size, mode)
    except InputError as error:
        raise ConfigError(f"{name}: {key}: {error}") from None


def _integer(value: Any, where: str) -> int:
    # true is an integer to Python.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: expected an integer, got {value!r:.40}")
    return value


def text_class(config: Mapping[str, Any], model: Model) -> str:
    """Return the model type of the class with the ``sanitize`` that reads the weights."""
    text = config.get("text_config")
    # The text model's sanitize reads the weights (mistral3.py, sanitize).
    if row_or_default(model.model_type).by_text_class and isinstance(text, Mapping):
        return str(text.get("model_type", "llama"))
    return model.model_type


def _foreign(block: Mapping[str, Any], model: Model, name: str, reader: str) -> Declared:
    method = block.get("quant_method")
    if not isinstance(method, str):
        shown = f"expected a string, got {method!r:.40}"
        raise ConfigError(f"{name}: quantization_config.quant_method: {shown}")
    if method == "fp8":
        return _fp8(block, model, reader)
    if method == "awq":
        return _awq(block, model)
    if method == "compressed-tensors":
        return _compressed(block, model, reader)
    if method == "modelopt":
        return _modelopt(block, model)
    if method == "mxfp4" and row_or_default(model.model_type).splits_mxfp4:
        quantization = Quantization(4, 32, "mxfp4")
        return Declared(method, quantization, _only_experts(model, quantization))
    bits = block.get("bits")
    # Only to count parameters: a wrong number must not stop the estimate.
    packed = bits if isinstance(bits, int) and bits in (2, 3, 4, 8) else 4
    why = _REFUSED.get(method, f"quantisation method {method[:40]!r}")
    return Declared(method, _QUANTISES.get(method), None, _dequantised(model, why), packed)


# What mlx-lm takes `.scales` to be where the checkpoint already has MLX's own names.
_QUANTISES = {"mxfp4": Quantization(4, 32, "mxfp4"), "mxfp8": Quantization(8, 32, "mxfp8")}
_REFUSED = {
    "gptq": "GPTQ's packing along the inputs, nor its g_idx",
    "bitnet": "BitNet's weights unless they are packed four to a byte",
}


def _fp8(block: Mapping[str, Any], model: Model, reader: str) -> Declared:
    if block.get("scale_fmt") == "ue8m0" and block.get("weight_block_size") == [32, 32]:
        # mlx-lm would keep them packed, but for names that the described classes do not read.
        quantises, what = Quantization(8, 32, "mxfp8"), "FP8 in blocks of 32 x 32"
        return Declared("fp8", quantises, None, _dequantised(model, what))
    if row_or_default(reader).fp8:
        return Declared("fp8")
    return Declared("fp8", None, None, _dequantised(model, f"FP8 of {reader}"))


def _awq(block: Mapping[str, Any], model: Model) -> Declared:
    bits, group_size = block.get("bits", 4), block.get("group_size", 128)
    # Four bits alone (_transform_awq_weights), in groups that mx.quantize has.
    if bits != 4 or group_size not in (32, 64, 128):
        shown = f"{str(bits)[:20]} bits in groups of {str(group_size)[:20]}"
        return Declared("awq", None, None, _dequantised(model, f"AWQ with {shown}"))
    quantization = Quantization(4, group_size)
    return Declared("awq", quantization, _awq_plan(block, model, quantization))


def _awq_plan(
    block: Mapping[str, Any], model: Model, quantization: Quantization
) -> QuantizationPlan:
    names = block.get("modules_to_not_convert")
    skipped = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    # AutoAWQ packs the linear layers of decoder blocks, and no router.
    kept = (Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.VISION)

    def is_kept(path: str, module: Module) -> bool:
        return module.part in kept or any(name in path for name in skipped)

    return _all_but(model, quantization, is_kept)


_COMPRESSED = {
    "nvfp4-pack-quantized": Quantization(4, 16, "nvfp4"),
    "mxfp4-pack-quantized": Quantization(4, 32, "mxfp4"),
    # mlx-lm takes these numbers without looking at the block's own.
    "pack-quantized": Quantization(4, 32),
}


def _compressed(block: Mapping[str, Any], model: Model, reader: str) -> Declared:
    form = str(block.get("format"))
    quantises = _COMPRESSED.get(form)
    if form == "pack-quantized" and row_or_default(reader).unpacks_integers:
        plan = _only_experts(model, Quantization(4, 32))
        text = "only the headers show which matrices are packed; the experts are taken to be"
        return Declared("compressed-tensors", quantises, plan, text)
    what = f"compressed-tensors of format {form[:40]!r}"
    if quantises:
        what += " under its own tensor names, only under MLX's"
    return Declared("compressed-tensors", quantises, None, _dequantised(model, what))


def _modelopt(block: Mapping[str, Any], model: Model) -> Declared:
    """hf_quant_config.json nests the settings, config.json does not (mlx-lm utils.py)."""
    settings = block.get("quantization", block)
    algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    if algorithm != "NVFP4":
        what = f"ModelOpt's quant_algo {str(algorithm)[:40]!r}"
        return Declared("modelopt", None, None, _dequantised(model, what))
    what = "ModelOpt's NVFP4 under its own tensor names, only under MLX's"
    return Declared("modelopt", Quantization(4, 16, "nvfp4"), None, _dequantised(model, what))


def _dequantised(model: Model, what: str) -> str:
    return (
        f"mlx-lm does not load {what}; the figure is of the model dequantised to {model.dtype},"
        " as it must be before conversion"
    )


def _only_experts(model: Model, quantization: Quantization) -> QuantizationPlan:
    return _all_but(model, quantization, lambda _, module: module.part is not Part.EXPERTS)


def _all_but(
    model: Model, quantization: Quantization, is_kept: Callable[[str, Module], bool]
) -> QuantizationPlan:
    overrides = {
        path: None
        for path, module in model.all_modules()
        if module.quantizable and is_kept(path, module)
    }
    return QuantizationPlan(quantization, overrides)
