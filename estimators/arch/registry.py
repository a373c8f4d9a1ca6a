"""From a config to a model: which family describes which ``model_type``."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.fields import Fields, config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.structural import unread_keys
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError

# model_type -> module of arch/families, imported only when asked for.
FAMILIES: dict[str, str] = {
    "apertus": "dense",
    "bailing_moe": "bailing_moe",
    "cohere": "dense",
    "cohere2": "dense",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "ernie4_5": "dense",
    "ernie4_5_moe": "moe",
    "exaone": "dense",
    "exaone4": "dense",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "mamba",
    "gemma": "dense",
    "gemma2": "dense",
    "gemma3": "wrappers",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "wrappers",
    "gemma4_text": "gemma4",
    "gemma4_unified": "wrappers",
    "glm": "dense",
    "glm4": "dense",
    "glm4_moe": "moe",
    "glm4v": "vision_wrappers",
    "glm4v_moe": "vision_wrappers",
    "glm_moe_dsa": "deepseek",
    "glm_ocr": "vision_wrappers",
    "gpt2": "dense",
    "gpt_neox": "dense",
    "gpt_oss": "gpt_oss",
    "granite": "dense",
    "granitemoe": "moe",
    "granitemoehybrid": "granitemoehybrid",
    "helium": "dense",
    "hunyuan": "hunyuan",
    "hunyuan_v1_dense": "dense",
    "internlm2": "dense",
    "internlm3": "dense",
    "internvl_chat": "vision_wrappers",
    "iquestcoder": "dense",
    "jamba": "jamba",
    "joyai_llm_flash": "deepseek",
    "kimi_k2": "deepseek",
    "kimi_linear": "kimi_linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "llama": "dense",
    "llama4": "wrappers",
    "llama4_text": "llama4",
    "llava": "wrappers",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "mimo": "dense",
    "mimo_v2_flash": "mimo_v2_flash",
    "minicpm": "dense",
    "minicpm3": "minicpm3",
    "minimax": "moe",
    "minimax_m2": "moe",
    "ministral3": "dense",
    "mistral": "dense",
    "mistral3": "wrappers",
    "mixtral": "moe",
    "mllama": "vision_wrappers",
    "nemotron": "dense",
    "nemotron_h": "nemotron_h",
    "olmo2": "dense",
    "olmo3": "dense",
    "olmoe": "moe",
    "phi": "dense",
    "phi3": "dense",
    "phimoe": "moe",
    "qwen": "dense",
    "qwen2": "dense",
    "qwen2_5_vl": "wrappers",
    "qwen2_moe": "moe",
    "qwen2_vl": "wrappers",
    "qwen3": "dense",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_moe": "moe",
    "qwen3_next": "qwen3_next",
    "qwen3_vl": "wrappers",
    "qwen3_vl_moe": "wrappers",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv7": "rwkv7",
    "seed_oss": "dense",
    "smollm3": "dense",
    "solar_open": "moe",
    "stablelm": "dense",
    "starcoder2": "dense",
    "step3p5": "step3p5",
    "telechat3": "dense",
    "xverse": "dense",
}

_MAX_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    "max_seq_len",
    "n_positions",
    "seq_length",
)


def build_model(config: Mapping[str, Any], name: str, *, assumed: bool = False) -> Model:
    """Return the model a config describes; ``name`` is how messages name the config.

    Where its type is only ``assumed``, keys that look structural and that nobody read become notes.

    Raises:
        ConfigError: when a key is missing or holds a wrong value.
        UnsupportedError: when the model type is not described, or a key that looks
            structural was read by nobody.
    """
    fields = config_fields(config, name)
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedError(f"{name}: model_type: {model_type[:60]!r} is not described")
    model: Model = family(model_type).build(fields)
    unknown = list(unread_keys(fields))
    if unknown and assumed:
        text = f"{', '.join(unknown[:5])}: unknown to {model_type}, and ignored"
        model = replace(model, notes=(*model.notes, text))
    elif unknown:
        raise UnsupportedError(
            f"{name}: {', '.join(unknown[:5])}: looks structural and is not described for"
            f" model type {model_type!r}; its caches and workspace cannot be given"
        )
    for section in _sections(fields):
        _hold_layer_types(section, len(model.layers))
    return replace(
        model, dtype=dtype_of(fields, name), max_context=model.max_context or context_limit(fields)
    )


def _hold_layer_types(section: Fields, layers: int) -> None:
    """A class that does without the list still shows, by a short one, that the config is cut."""
    kinds = section.texts("layer_types")
    if kinds is not None and len(kinds) < layers:
        raise section.fail("layer_types", f"{len(kinds)} entries for {layers} layers")


def family(model_type: str) -> Any:
    """Return the module that describes a model type; its ``build`` takes the config's fields."""
    return import_module(f"memfit.estimators.arch.families.{FAMILIES[model_type]}")


def _sections(fields: Fields) -> tuple[Fields, ...]:
    return (fields, fields.section("text_config")) if fields.has("text_config") else (fields,)


def dtype_of(fields: Fields, name: str) -> str:
    """Return the type of activations that the config names, bfloat16 when it names none."""
    for section in _sections(fields):
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                where = f"{name}: {section.full_path(key)}"
                return dtypes.from_config_name(section.text(key), where=where)
    return "BF16"


def context_limit(fields: Fields) -> int | None:
    """Return the longest context the config names, in tokens."""
    for section in reversed(_sections(fields)):
        for key in _MAX_CONTEXT_KEYS:
            if section.has(key):
                return section.count(key)
    return None
