"""Tensors that a model class removes from a checkpoint before it loads the rest.

Source: the `sanitize` method of each mlx-lm model class; a name that none of them removes is
refused by the strict load.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from memfit.estimators.arch.model import Model
from memfit.estimators.weights.tensor_groups import TensorGroup

# Frequencies that old versions of transformers saved and mlx-lm computes (llama.py, sanitize).
_ROTARY = r"self_attn\.rotary_emb\.inv_freq"
_ROPE = r"attention\.rope\.inv_freq"
# mlx-lm loads the language model alone of such classes (mistral3.py, sanitize).
_TOWERS = r"vision_tower|multi_modal_projector"
_QWEN_TOWERS = r"^(visual|vision_tower)\."
_GEMMA4 = (
    r"^(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_audio|embed_vision"
    r"|vision_embedder)"
)
# Rotary frequencies, and limits of activations (gemma4_text.py, sanitize).
_GEMMA4_TEXT = r"self_attn\.rotary_emb|(in|out)put_(max|min)"
# What mlx-vlm's classes keep is a runtime's for images to add: mlx_vlm/models, sanitize.
_GLM4V = r"^(model\.visual|vision_tower)\."
_LLAMA4 = r"vision_model|multi_modal_projector"
# By number, as the class does: layer 61 is the prediction layer of DeepSeek-V3.
_DEEPSEEK_V3 = r"^model\.layers\.61|rotary_emb\.inv_freq"

# mtp: multi-token prediction, which mlx-lm does not run.
_PATTERNS: dict[str, str] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "ernie4_5_moe": (
        r"mtp_block\.|mtp_linear_proj\.|mtp_hidden_norm\.|mtp_emb_norm\.|e_score_correction_bias"
    ),
    "gemma3": r"^(vision_tower|multi_modal_projector)\.",
    "gemma3n": r"^model\.(vision_tower|audio_tower|embed_audio|embed_vision)\.",
    "gemma4": f"{_GEMMA4}|{_GEMMA4_TEXT}",
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified": f"{_GEMMA4}|{_GEMMA4_TEXT}",
    "glm": _ROTARY,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    # By number, as the class does: the layer that predicts another token.
    "glm_ocr": rf"{_GLM4V}|layers\.16",
    # Causal masks that PyTorch keeps as buffers of the attention.
    "gpt2": r"^h\.\d+\.attn\.bias$",
    "gpt_neox": r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
    "internlm2": _ROPE,
    "internlm3": _ROPE,
    "internvl_chat": r"^vision_model\.",
    "iquestcoder": _ROTARY,
    "joyai_llm_flash": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_linear": r"^model\.mtp",
    "llama": _ROTARY,
    "llama4": _LLAMA4,
    "llava": f"{_TOWERS}|{_ROTARY}",
    "mimo": rf"{_ROTARY}|^model\.mtp_layers\.",
    "mimo_v2_flash": r"^model\.mtp",
    "ministral3": _ROTARY,
    "mistral": _ROTARY,
    "mistral3": f"{_TOWERS}|{_ROTARY}",
    "mllama": rf"^(vision_model|vision_tower|multi_modal_projector)\.|{_ROTARY}",
    "nemotron_h": r"^mtp\.",
    "olmo2": _ROTARY,
    "qwen2": _ROTARY,
    "qwen2_5_vl": _QWEN_TOWERS,
    "qwen2_vl": _QWEN_TOWERS,
    "qwen3_5": r"^vision_tower|^model\.visual|mtp\.",
    "qwen3_5_moe": r"^vision_tower|^model\.visual|mtp\.",
    "qwen3_vl": _QWEN_TOWERS,
    "qwen3_vl_moe": r"^(?!language_model\.|model\.language_model\.|lm_head\.)",
    "smollm3": _ROTARY,
    "step3p5": r"\.mtp",
    "xverse": _ROTARY,
}
# Newer exports put language model and towers under one "model" (qwen2_vl.py, sanitize).
_NESTED_TOWERS = ("model.language_model.", r"^model\.(?!language_model\.)")
# What is removed from one layout only, which some tensor's name shows.
_IN_LAYOUT: dict[str, tuple[str, str]] = {
    "qwen2_5_vl": _NESTED_TOWERS,
    "qwen2_vl": _NESTED_TOWERS,
    "qwen3_next": (".mlp.experts.*.up_proj.weight", r"mtp\."),
    "qwen3_vl": _NESTED_TOWERS,
}
# Layers after the model's last, which predict further tokens.
_DROPS_LATER_LAYERS = ("deepseek_v32", "glm_moe_dsa", "step3p5")
# As those, but by the number of one layer.
_DROPS_NEXT_LAYER = {
    "glm4_moe": r"^model\.layers\.",
    "glm4v_moe": r"^(model\.language_model|language_model\.model)\.layers\.",
    "solar_open": r"^model\.layers\.",
}
# Classes that take `lm_head.weight` out where the config ties it to the embedding.
_DROPS_TIED_HEAD = frozenset(
    """apertus bailing_moe glm granite granitemoe granitemoehybrid hunyuan_v1_dense iquestcoder
    jamba kimi_linear llama mimo ministral3 mistral mixtral qwen2 qwen3 qwen3_moe
    qwen3_next seed_oss smollm3 xverse""".split()
)
_DROPS_NESTED_HEAD = frozenset({"llava", "mistral3"})


def drop_rule(model: Model, tensors: Iterable[TensorGroup]) -> Callable[[str], bool]:
    """Return a function that says whether the model's class removes a tensor, by its name."""
    # One expression for all patterns: a checkpoint can have a hundred thousand names.
    patterns = list(_patterns(model, tensors))
    found = re.compile("|".join(patterns)).search if patterns else None
    later = model.model_type in _DROPS_LATER_LAYERS
    # gemma4_text.py, sanitize: layers that share keys and values have no projections for them.
    sharing = _sharing(model) if model.model_type.startswith("gemma4") else frozenset[str]()

    def is_dropped(name: str) -> bool:
        if found and found(name):
            return True
        if later and _layer_of(name) >= len(model.layers):
            return True
        return bool(sharing) and _in_layer(name) in sharing

    return is_dropped


def _patterns(model: Model, tensors: Iterable[TensorGroup]) -> Iterator[str]:
    model_type = model.model_type
    if model_type in _PATTERNS:
        yield _PATTERNS[model_type]
    needle, pattern = _IN_LAYOUT.get(model_type, ("", ""))
    # qwen3_next.py returns early, and drops nothing, when no experts are to be stacked.
    if needle and any(needle in tensor.name for tensor in tensors):
        yield pattern
    if model_type in _DROPS_NEXT_LAYER:
        # A prefix without an end, as in glm4_moe.py: startswith finds 460 where the layer is 46.
        yield f"{_DROPS_NEXT_LAYER[model_type]}{len(model.layers)}"
    if model.tied_head and model_type in _DROPS_TIED_HEAD:
        yield r"^lm_head\.weight$"
    if model.tied_head and model_type in _DROPS_NESTED_HEAD:
        yield r"^(language_model\.)?lm_head\.weight$"


def _sharing(model: Model) -> frozenset[str]:
    """Keys and values of the layers that have no use for their own."""
    return frozenset(
        f"{index}.self_attn.{name}"
        for index, layer in enumerate(model.layers)
        if not all(module.loaded for module in layer.modules)
        for name in ("k_proj", "v_proj", "k_norm")
    )


def _in_layer(name: str) -> str:
    """What follows `layers.`, less the last word."""
    return name.partition("layers.")[2].rpartition(".")[0]


def _layer_of(name: str) -> int:
    """The number after `model.layers.`, -1 where there is none."""
    words = name.split(".", 3)
    known = len(words) > 2 and words[1] == "layers" and words[2].isdecimal()
    # Nine digits at most: a name is hostile input, and int() of thousands of digits is slow.
    return int(words[2][:9]) if known else -1
