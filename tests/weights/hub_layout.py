"""Checkpoints as published on the Hub: mlx-lm's names and shapes changed back to the originals.

Each rule reverses the class's `sanitize` (mlx-lm models/<model_type>.py).
"""

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx

Tensors = dict[str, mx.array]

_W = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_NEMOTRON = {"fc1": "up_proj", "fc2": "down_proj"}


def unstacked(tensors: Tensors, names: dict[str, str] | None = None) -> Tensors:
    result: Tensors = {}
    for name, value in tensors.items():
        parent, found, leaf = name.partition(".switch_mlp.")
        if not found:
            result[name] = value
            continue
        matrix, _, kind = leaf.partition(".")
        for expert in range(value.shape[0]):
            matrix_name = (names or {}).get(matrix, matrix)
            result[f"{parent}.experts.{expert}.{matrix_name}.{kind}"] = value[expert]
    return result


def renamed(*rules: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """The first matching rule is applied."""

    def rename(name: str) -> str:
        for pattern, replacement in rules:
            name, count = re.subn(pattern, replacement, name)
            if count:
                break
        return name

    return lambda tensors: {rename(name): value for name, value in tensors.items()}


def merged_latent(tensors: Tensors) -> Tensors:
    """embed_q and unembed_out become kv_b_proj."""
    result = dict(tensors)
    for name in [n for n in tensors if n.endswith(".embed_q.weight")]:
        parent = name.removesuffix(".embed_q.weight")
        keys, values = result.pop(name), result.pop(f"{parent}.unembed_out.weight")
        joined = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
        result[f"{parent}.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    return result


def fused(stack: str, joined: str, down: str, axis: int, *, swap: bool) -> Callable[..., Tensors]:
    """Gate and up projections of all experts in one tensor."""

    def fuse(tensors: Tensors) -> Tensors:
        result = dict(tensors)
        for name in [n for n in tensors if n.endswith(f"{stack}gate_proj.weight")]:
            parent = name.removesuffix(f"{stack}gate_proj.weight")
            gate, up = result.pop(name), result.pop(f"{parent}{stack}up_proj.weight")
            last = result.pop(f"{parent}{stack}down_proj.weight")
            both = mx.concatenate([gate, up], axis=axis)
            result[f"{parent}{joined}"] = both.swapaxes(-1, -2) if swap else both
            result[f"{parent}{down}"] = last.swapaxes(-1, -2) if swap else last
        return result

    return fuse


def _deepseek(tensors: Tensors) -> Tensors:
    return unstacked(merged_latent(tensors))


def _by_w(tensors: Tensors) -> Tensors:
    return unstacked(tensors, _W)


def _dots1(tensors: Tensors) -> Tensors:
    return unstacked(renamed((r"\.mlp\.experts\.", ".mlp.switch_mlp."))(tensors))


_NESTED = renamed(
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
)
_QWEN_EXPERTS = ("experts.gate_up_proj", "experts.down_proj", -2)


def _kimi_linear(tensors: Tensors) -> Tensors:
    rename = renamed(
        (r"\.([qkv])_conv\.conv\.", r".\1_conv1d."),
        (r"\.mlp\.(?=switch_mlp|shared_experts)", ".block_sparse_moe."),
        (r"\.mlp\.gate\.weight", ".block_sparse_moe.gate.weight"),
        (r"\.mlp\.e_score", ".block_sparse_moe.gate.e_score"),
    )
    return merged_latent(_by_w(rename(tensors)))


_STEP = renamed(
    (r"\.mlp\.switch_mlp\.", ".moe."),
    (r"\.mlp\.gate\.gate\.", ".moe.gate."),
    (r"\.mlp\.gate\.router_bias", ".moe.router_bias"),
    (r"\.mlp\.share_expert\.", ".share_expert."),
)


def _qwen3_5_moe(tensors: Tensors) -> Tensors:
    return _NESTED(fused("switch_mlp.", *_QWEN_EXPERTS, swap=False)(tensors))


def _qwen3_vl_moe(tensors: Tensors) -> Tensors:
    return _NESTED(fused("switch_mlp.", *_QWEN_EXPERTS, swap=True)(tensors))


def _gemma4(tensors: Tensors) -> Tensors:
    fuse = fused("experts.switch_glu.", *_QWEN_EXPERTS, swap=False)
    return renamed((r"^language_model\.model\.", "model.language_model."))(fuse(tensors))


def _granite(tensors: Tensors) -> Tensors:
    names = ("input_linear.weight", "output_linear.weight", 1)
    return fused("switch_mlp.", *names, swap=False)(tensors)


def _gpt2(tensors: Tensors) -> Tensors:
    """Its matrices take inputs from the left, with a mask for each layer."""
    result = renamed((r"^model\.", ""))(tensors)
    for name in result:
        if re.search(r"\.c_\w+\.weight$", name):
            result[name] = result[name].T
    return {**result, "h.0.attn.bias": mx.zeros((1, 1, 8, 8))}


_LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"), _deepseek
    ),
    **dict.fromkeys(("joyai_llm_flash", "kimi_vl"), _deepseek),
    **dict.fromkeys(("lfm2_moe", "minimax", "minimax_m2", "mixtral", "phimoe"), _by_w),
    **dict.fromkeys(
        ("llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl"), _NESTED
    ),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _gemma4),
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), _granite),
    "bailing_moe": lambda t: renamed((r"\.gate\.gate_proj\.", ".gate."))(unstacked(t)),
    "dots1": _dots1,
    "gpt2": _gpt2,
    "gpt_neox": renamed(
        (r"^model\.h\.", "gpt_neox.layers."),
        (r"^model\.(?!embed_out)", "gpt_neox."),
        (r"^model\.embed_out", "embed_out"),
    ),
    "kimi_linear": _kimi_linear,
    "llama4": fused("experts.", "experts.gate_up_proj", "experts.down_proj", -2, swap=True),
    "nemotron_h": lambda t: unstacked(t, _NEMOTRON),
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "step3p5": _STEP,
}


def hub_layout(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Return a model's tensors named and shaped as its authors publish them."""
    published = _LAYOUTS.get(config["model_type"], unstacked)(tensors)
    return {
        name: value.swapaxes(1, 2) if "conv" in name and value.ndim == 3 else value
        for name, value in published.items()
    }
