"""How a config says that weights are packed, and what a conversion starts from."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.weights.quantization_plan import foreign_block

PACKS_ITSELF = ("prism_hadamard_qwen35",)
"""A class that builds the packed modules that its config lists, and packs no others."""

# Output heads and routers, which AutoAWQ does not quantise.
_NEVER_AWQ = frozenset({"lm_head", "embed_out", "output", "gate", "router"})
_QUANTIZATION = ("quantization", "quantization_config")


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of the format of its weights.

    A class that packs its weights itself is never built without.
    """
    if config.get("model_type") in PACKS_ITSELF:
        return dict(config)
    plain = {key: config[key] for key in config if key not in _QUANTIZATION}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: text[key] for key in text if key not in _QUANTIZATION}
    return plain


def to_convert(
    config: Mapping[str, Any], tensors: Iterable[Tensor] | None
) -> tuple[dict[str, Any], Iterable[Tensor] | None]:
    """Return config and tensors of what a conversion starts from.

    mlx-lm leaves packed matrices as they are: the figure is of the original ones, of which there
    are no headers.
    """
    plain = unquantised(config)
    return plain, tensors if plain == config else None


def unread_format(config: Mapping[str, Any]) -> str | None:
    """Return the declared quantisation method if its packed layout is unknown, or None."""
    block = foreign_block(config)
    if config.get("quantization") is not None or not isinstance(block, Mapping):
        return None
    method = block.get("quant_method")
    return None if method is None or _packed_by_method(config) else str(method)


def _packed_by_method(
    config: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Callable[[str, Any], bool]] | None:
    """Return how mlx-lm packs the matrices of another library's method, and which it packs.

    None for methods that mlx-lm dequantises or does not load. Without files to list the packed
    matrices, they are those that the method packs: OpenAI's experts, AutoAWQ's linear layers.
    Source: mlx-lm utils.py, load_model; for packed integers models/deepseek_v3.py, sanitize.
    """
    block = foreign_block(config)
    method, model_type = block.get("quant_method"), config["model_type"]
    if method == "mxfp4" and row_or_default(model_type).splits_mxfp4:
        return {"bits": 4, "group_size": 32, "mode": "mxfp4"}, _is_experts
    integers = method == "compressed-tensors" and block.get("format") == "pack-quantized"
    if integers and row_or_default(model_type).unpacks_integers:
        return {"bits": 4, "group_size": 32}, _is_experts
    # mlx-lm's default too (utils.py, _transform_awq_weights).
    group_size = block.get("group_size", 128)
    if method == "awq" and block.get("bits", 4) == 4 and group_size in (32, 64, 128):
        skipped = [n for n in block.get("modules_to_not_convert") or () if isinstance(n, str)]
        return {
            "bits": 4,
            "group_size": group_size,
        }, lambda path, module: _is_awq(path, module) and not any(name in path for name in skipped)
    return None


def _is_experts(_: str, module: Any) -> bool:
    return type(module).__name__ == "SwitchLinear"


def _is_awq(path: str, module: Any) -> bool:
    return type(module).__name__ != "Embedding" and _NEVER_AWQ.isdisjoint(path.split("."))


def quantize_as_declared(nn: Any, model: Any, config: dict[str, Any]) -> None:
    """Quantise as load_model would do with the files of the config. Source: mlx-lm utils.py."""
    if config["model_type"] in PACKS_ITSELF:
        return
    block = config.get("quantization")
    if block is None:
        block = foreign_block(config)
        if not block:
            return
        if "quant_method" in block:
            if packed := _packed_by_method(config):
                quantize_modules(nn, model, *packed)
            return
        if "bits" not in block:
            return
    # A property of some classes, None where every matrix is packed (mlx-lm models/qwen3_5.py).
    predicate = getattr(model, "quant_predicate", None) or (lambda *_: True)

    def is_quantised(path: str, module: Any) -> Any:
        # mlx_lm.convert writes what a predicate answers in other bits into the block.
        return block[path] if path in block else bool(predicate(path, module))

    quantize_modules(nn, model, block, is_quantised)


def quantize_modules(
    nn: Any, model: Any, block: Mapping[str, Any], is_quantised: Callable[[str, Any], Any]
) -> None:
    """Quantise modules as a converted config's ``block`` says, others where ``is_quantised``."""

    def fits(path: str, module: Any) -> Any:
        if path in block:
            return block[path]
        # The converters pack no matrix with rows that do not divide into groups.
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % block["group_size"]:
            return False
        return is_quantised(path, module)

    nn.quantize(
        model,
        group_size=block["group_size"],
        bits=block["bits"],
        mode=block.get("mode", "affine"),
        class_predicate=fits,
    )


def packed_block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the block of a config that says how MLX packs its matrices."""
    block = config.get("quantization") or config.get("quantization_config")
    return block if isinstance(block, Mapping) and {"bits", "group_size"} <= block.keys() else None


def unread_by_mlx_vlm(config: Mapping[str, Any]) -> str | None:
    """Return the declared quantisation method if its packed layout is not MLX's, or None."""
    block = config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    return None if method is None or packed_block(config) else str(method)
