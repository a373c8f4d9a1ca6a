"""From a config to a model: which family describes which ``model_type``."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.class_row import ClassRow
from memfit.estimators.arch.fields import Fields, config_fields, unread_keys
from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError

# The files of arch/families/ with rows, and the model types of each; a file is imported only when
# one of its types is asked for.
_FILES: dict[str, str] = {
    "bailing_moe": "bailing_moe",
    "deepseek": "deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa joyai_llm_flash kimi_k2 minicpm3",
    "dense_models": """
        apertus cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite helium
        hunyuan_v1_dense internlm3 iquestcoder llama mimo minicpm ministral3 mistral nemotron olmo2
        olmo3 phi3 qwen2 qwen3 seed_oss smollm3 stablelm telechat3 xverse
        """,
    "dense_other_names": "exaone gpt2 gpt_neox internlm2 phi qwen starcoder2",
    "falcon_h1": "falcon_h1",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "gpt_oss": "gpt_oss",
    "granitemoehybrid": "granitemoehybrid",
    "hunyuan": "hunyuan",
    "jamba": "jamba",
    "kimi_linear": "kimi_linear",
    "lfm2": "lfm2 lfm2_moe",
    "llama4": "llama4_text",
    "mamba": "falcon_mamba mamba mamba2",
    "mimo_v2_flash": "mimo_v2_flash",
    "moe_models": """
        dots1 ernie4_5_moe glm4_moe granitemoe minimax minimax_m2 mixtral olmoe phimoe qwen2_moe
        qwen3_moe solar_open
        """,
    "nemotron_h": "nemotron_h",
    "qwen3_next": "qwen3_5 qwen3_5_moe qwen3_next",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv7": "rwkv7",
    "step3p5": "step3p5",
    "vision_wrappers": "glm4v glm4v_moe glm_ocr internvl_chat mllama",
    "wrappers": """
        gemma3 gemma4 gemma4_unified llama4 llava mistral3 qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe
        """,
}
FAMILIES: dict[str, str] = {
    model_type: file
    for model_type, file in sorted(
        (model_type, file) for file, types in _FILES.items() for model_type in types.split()
    )
}
"""The file with the row of each described model type."""

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
    row = class_row(model_type)
    if row is None:
        raise UnsupportedError(f"{name}: model_type: {model_type[:60]!r} is not described")
    model = row.build(fields)
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
        model,
        model_type=model_type,
        dtype=dtype_of(fields, name),
        max_context=model.max_context or context_limit(fields),
    )


def _hold_layer_types(section: Fields, layers: int) -> None:
    """A class that does without the list still shows, by a short one, that the config is cut."""
    kinds = section.texts("layer_types")
    if kinds is not None and len(kinds) < layers:
        raise section.fail("layer_types", f"{len(kinds)} entries for {layers} layers")


def class_row(model_type: str) -> ClassRow | None:
    """Return what is known of the class of a model type; None where nothing describes it."""
    file = FAMILIES.get(model_type)
    if file is None:
        return None
    rows: dict[str, ClassRow] = import_module(f"memfit.estimators.arch.families.{file}").CLASSES
    return rows[model_type]


def row_or_default(model_type: str) -> ClassRow:
    """Return what is known of the class of a model type; defaults where nothing describes it."""
    return class_row(model_type) or ClassRow()


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
