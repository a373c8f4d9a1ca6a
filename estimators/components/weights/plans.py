"""The quantisation a config declares, as mlx-lm reads it when it loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module, Part
from memfit.estimators.arch.quantization import DEFAULTS, Quantization
from memfit.estimators.components.weights.derived import Plan
from memfit.estimators.errors import ConfigError, InputError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Declared:
    """What a config says of its weights' format.

    ``method`` is None for plain weights, ``mlx`` for MLX's own block, else the foreign method.
    ``plan`` is how mlx-lm keeps the weights once loaded; None: unquantised. ``bound`` says why
    the plan is only an upper bound.
    """

    method: str | None = None
    plan: Plan | None = None
    bound: str | None = None


def declared(config: Mapping[str, Any], model: Model, name: str) -> Declared:
    """Return the format a config declares, by the rules of mlx-lm utils.py, load_model.

    Raises:
        ConfigError: when the block is malformed.
        UnsupportedError: when mlx-lm refuses the format.
    """
    block = config.get("quantization")
    if block is not None:
        return Declared("mlx", _mlx_plan(_mapping(block, name, "quantization"), name))
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    block = config.get("quantization_config") or nested
    if not block:
        return Declared()
    block = _mapping(block, name, "quantization_config")
    if "quant_method" not in block and "bits" in block:
        return Declared("mlx", _mlx_plan(block, name))
    return _foreign(block, model, name)


def _mapping(value: Any, name: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: {key}: expected an object, got {type(value).__name__}")
    return value


def _mlx_plan(block: Mapping[str, Any], name: str) -> Plan:
    default = _format(block, name, "quantization")
    overrides: dict[str, Quantization | None] = {}
    for path, value in block.items():
        if value is False:
            overrides[path] = None
        elif isinstance(value, Mapping):
            overrides[path] = _format({**_unsaid(value), **value}, name, f"quantization.{path}")
    return Plan(default, overrides)


def _unsaid(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a path's entry leaves to MLX's own defaults (``to_quantized``), not to the block's."""
    mode = entry.get("mode")
    known = DEFAULTS.get(mode if isinstance(mode, str) else "affine", DEFAULTS["affine"])
    return dict(zip(("bits", "group_size"), known, strict=True))


def _format(block: Mapping[str, Any], name: str, key: str) -> Quantization:
    bits, group_size, mode = block.get("bits"), block.get("group_size"), block.get("mode", "affine")
    for part, value in (("bits", bits), ("group_size", group_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}: {key}.{part}: expected an integer, got {value!r:.40}")
    if not isinstance(mode, str):
        raise ConfigError(f"{name}: {key}.mode: expected a text, got {mode!r:.40}")
    try:
        return Quantization(int(bits), int(group_size), mode)  # type: ignore[arg-type]
    except InputError as error:
        raise ConfigError(f"{name}: {key}: {error}") from None


def _foreign(block: Mapping[str, Any], model: Model, name: str) -> Declared:
    method = block.get("quant_method")
    if method == "mxfp4":
        return Declared(method, _only_experts(model, Quantization(4, 32, "mxfp4")))
    if method == "mxfp8":
        return Declared(method, _linears(model, Quantization(8, 32, "mxfp8")))
    if method == "fp8":
        if model.model_type in _DEQUANTISES_FP8:
            return Declared(method)
        packed = block.get("scale_fmt") == "ue8m0" and block.get("weight_block_size") == [32, 32]
        if packed:
            return Declared(method, _linears(model, Quantization(8, 32, "mxfp8")))
        return Declared(method, None, _dequantised(model, "FP8 of this model type"))
    if method in ("awq", "gptq"):
        return Declared(method, _linears(model, _packed_integers(block, method, name)))
    if method == "compressed-tensors":
        return _compressed(block, model, name)
    if method == "modelopt":
        settings = _mapping(block.get("quantization", block), name, "quantization_config")
        if settings.get("quant_algo") == "NVFP4":
            return Declared(method, _linears(model, Quantization(4, 16, "nvfp4")))
    raise UnsupportedError(
        f"{name}: quantization_config.quant_method: mlx-lm does not load {str(method)[:40]!r}"
        " weights of this kind; convert the original weights with mlx_lm.convert"
    )


def _packed_integers(block: Mapping[str, Any], method: str, name: str) -> Quantization:
    bits, group_size = block.get("bits", 4), block.get("group_size", 128)
    if bits != 4:
        raise UnsupportedError(
            f"{name}: quantization_config.bits: mlx-lm loads {method} with 4 bits only,"
            f" not {str(bits)[:20]}"
        )
    return _format({"bits": bits, "group_size": group_size}, name, "quantization_config")


# Model classes whose `sanitize` dequantises blocks of FP8 to the activations' type
# (mlx-lm 0.32, models/*.py: weight_scale_inv).
_DEQUANTISES_FP8 = {
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "kimi_k2",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "ministral3",
    "mistral3",
}

_COMPRESSED = {
    "nvfp4-pack-quantized": Quantization(4, 16, "nvfp4"),
    "mxfp4-pack-quantized": Quantization(4, 32, "mxfp4"),
    "pack-quantized": Quantization(4, 32),
}


def _compressed(block: Mapping[str, Any], model: Model, name: str) -> Declared:
    form = block.get("format")
    quantization = _COMPRESSED.get(form) if isinstance(form, str) else None
    if quantization is not None:
        return Declared("compressed-tensors", _linears(model, quantization))
    what = f"compressed-tensors of format {str(form)[:40]!r}"
    return Declared("compressed-tensors", None, _dequantised(model, what))


def _dequantised(model: Model, what: str) -> str:
    return (
        f"mlx-lm does not load {what}; the figure is of the model dequantised to {model.dtype},"
        " as it must be before conversion"
    )


def _linears(model: Model, quantization: Quantization) -> Plan:
    """Foreign formats quantise the layers' matrices and leave embedding, head and router alone."""
    kept = (Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.VISION)
    return _all_but(model, quantization, lambda module: module.part in kept)


def _only_experts(model: Model, quantization: Quantization) -> Plan:
    return _all_but(model, quantization, lambda module: module.part is not Part.EXPERTS)


def _all_but(model: Model, quantization: Quantization, kept: Any) -> Plan:
    overrides = {path: None for path, module in model.all_modules() if _is_kept(module, kept)}
    return Plan(quantization, overrides)


def _is_kept(module: Module, kept: Any) -> bool:
    return module.quantizable and bool(kept(module))
