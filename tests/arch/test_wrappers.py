"""Multimodal configs: the text model is found, the towers are counted on disk and never loaded."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import build_model
from memfit.estimators.arch.specs import Attention, Growth
from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.weights.derived import derive

CASES = Path(__file__).parent / "cases"
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
QWEN3_VISION = {
    "model_type": "qwen3_vl",
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": SIGLIP,
}
QWEN3_VL_8B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "vision_config": QWEN3_VISION,
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
MISTRAL_SMALL_3_1: dict[str, Any] = {
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "text_config": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "vocab_size": 131072,
    },
    "vision_config": {
        "model_type": "pixtral",
        "head_dim": 64,
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}
LLAVA_1_5_7B: dict[str, Any] = {
    "model_type": "llava",
    "ignore_index": -100,
    "vision_feature_layer": -2,
    "vocab_size": 32064,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
}
# The sizes of Gemma 4 E2B are the class's defaults.
GEMMA4_E2B: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {"model_type": "gemma4_text"},
    "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
    "audio_config": {"model_type": "gemma4_audio"},
}
GEMMA4_12B: dict[str, Any] = {
    "model_type": "gemma4_unified",
    "text_config": {
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "hidden_size": 3840,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
    },
    "vision_config": {"model_type": "gemma4_unified_vision"},
    "audio_config": {"model_type": "gemma4_unified_audio"},
}

_TOWERS = ("vision_config", "audio_config")

# Parameters of the published safetensors files, as the Hugging Face Hub gives them
# (`safetensors.total` of the model's API entry).
PUBLISHED = {
    "google/gemma-3-4b-it": (GEMMA3_4B, 4_300_079_472),
    "Qwen/Qwen3-VL-8B-Instruct": (QWEN3_VL_8B, 8_767_123_696),
    "Qwen/Qwen2.5-VL-7B-Instruct": (QWEN2_5_VL_7B, 8_292_166_656),
    "mistralai/Mistral-Small-3.1-24B": (MISTRAL_SMALL_3_1, 24_011_361_280),
    "llava-hf/llava-1.5-7b-hf": (LLAVA_1_5_7B, 7_063_427_072),
    "google/gemma-4-12B-it": (GEMMA4_12B, 11_959_730_224),
}


def _build(config: dict[str, Any], section: str = "", **changes: Any) -> Model:
    config = copy.deepcopy(config)
    (config[section] if section else config).update(changes)
    return build_model(config, "config.json")


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_text_model_and_towers_add_up_to_the_published_checkpoint(
    config: dict[str, Any], parameters: int
) -> None:
    assert derive(_build(config), None).parameters == parameters


def test_gemma_4_with_audio_equals_the_published_file_to_the_byte() -> None:
    # google/gemma-4-E2B-it: model.safetensors has 10,246,621,918 bytes, 263,960 of them header.
    assert derive(_build(GEMMA4_E2B), None).nbytes == 10_246_621_918 - 263_960


@pytest.mark.parametrize("config", [GEMMA3_4B, QWEN3_VL_8B, MISTRAL_SMALL_3_1, GEMMA4_E2B])
def test_towers_take_no_memory_once_loaded(config: dict[str, Any]) -> None:
    bare = {key: value for key, value in config.items() if key not in _TOWERS}
    with_towers, without = derive(_build(config), None), derive(_build(bare), None)
    assert with_towers.nbytes > without.nbytes
    assert with_towers.sizes == without.sizes


def test_an_unknown_kind_of_tower_gives_a_note_and_is_not_counted() -> None:
    model = _build(GEMMA3_4B, "vision_config", model_type="clip_vision_model", strange_layers=4)
    assert model.notes == ("the vision tower is not counted on disk; mlx-lm does not load it",)
    assert all(module.loaded for module in model.modules)


def test_a_tower_with_an_unknown_key_gives_a_note_and_is_not_counted() -> None:
    model = _build(QWEN3_VL_8B, "vision_config", num_registers_layers=4)
    assert "vision tower is not counted" in model.notes[0]


def test_a_wrong_size_in_a_tower_is_reported_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"vision_config\.depth: expected 1 to 4096"):
        _build(QWEN3_VL_8B, "vision_config", depth=10**30)


def test_an_unknown_key_in_the_text_section_is_reported() -> None:
    with pytest.raises(UnsupportedError, match=r"text_config\.num_memory_layers"):
        _build(MISTRAL_SMALL_3_1, "text_config", num_memory_layers=2)


def test_gemma3_uses_the_vocabulary_size_of_the_root() -> None:
    assert _build(GEMMA3_4B, "text_config", vocab_size=1000).vocab_size == 262208
    assert _build(GEMMA3_4B, vocab_size=1000).vocab_size == 1000


def test_gemma3_keeps_the_head_of_an_untied_checkpoint() -> None:
    assert _build(GEMMA3_4B).tied_head
    assert not _build(GEMMA3_4B, tie_word_embeddings=False).tied_head


def test_a_head_declared_where_mlx_lm_does_not_look_is_rejected() -> None:
    section = {key: QWEN2_5_VL_7B[key] for key in QWEN2_5_VL_7B if "_config" not in key}
    del section["tie_word_embeddings"]
    config = {"model_type": "qwen2_5_vl", "text_config": section, "tie_word_embeddings": False}
    with pytest.raises(ConfigError, match=r"text_config\.tie_word_embeddings: missing"):
        _build(config)
    del config["text_config"]
    with pytest.raises(ConfigError, match="hidden_size: missing"):
        _build(config)


def test_a_wrapper_without_its_own_cache_keeps_all_tokens_of_a_window() -> None:
    kinds = ["sliding_attention", "full_attention"] * 20
    model = _build(MISTRAL_SMALL_3_1, "text_config", layer_types=kinds, sliding_window=1024)
    mixer = model.layers[0].mixers[0]
    assert isinstance(mixer, Attention)
    assert (mixer.kind, mixer.growth) == ("sliding_attention", Growth.STEPS)
    assert not model.makes_own_cache


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3n", "llama4", "mistral3", "qwen3_vl_moe"])
def test_a_missing_text_section_is_reported(model_type: str) -> None:
    with pytest.raises(ConfigError, match="text_config: missing"):
        build_model({"model_type": model_type}, "config.json")


def test_an_unknown_text_model_is_reported() -> None:
    with pytest.raises(UnsupportedError, match=r"text_config\.model_type: 'mistral4'"):
        _build(MISTRAL_SMALL_3_1, "text_config", model_type="mistral4")


def test_gemma4_layer_overrides_must_match_what_the_class_builds() -> None:
    agreed = {"05": {"head_dim": 512, "num_key_value_heads": 1}}
    assert _build(GEMMA4_12B, "text_config", per_layer_config=agreed).layers
    with pytest.raises(ConfigError, match=r"per_layer_config\.05\.head_dim.*builds 512"):
        _build(GEMMA4_12B, "text_config", per_layer_config={"05": {"head_dim": 128}})
    with pytest.raises(ConfigError, match=r"per_layer_config\.48"):
        _build(GEMMA4_12B, "text_config", per_layer_config={"48": {}})


def test_gemma4_cache_sharing_needs_a_layer_of_the_same_kind() -> None:
    kinds = ["sliding_attention"] * 34 + ["full_attention"]
    with pytest.raises(ConfigError, match="no full_attention layer has a cache"):
        _build(GEMMA4_E2B, "text_config", layer_types=kinds)


def test_llama4_uses_one_expert_per_token() -> None:
    text = {
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "hidden_size": 256,
        "head_dim": 64,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 16,
        "vocab_size": 1000,
    }
    with pytest.raises(ConfigError, match=r"text_config\.num_experts_per_tok: 2"):
        build_model({"model_type": "llama4", "text_config": text}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "text"), [("kimi_vl", "deepseek_v3"), ("lfm2-vl", "lfm2"), ("pixtral", "llama")]
)
def test_a_wrapper_of_mlx_lm_has_the_layers_of_its_text_class(model_type: str, text: str) -> None:
    config = json.loads((CASES / f"{model_type}.json").read_text())
    # Each puts this into its section, whatever the config says.
    inner = {"num_attention_heads": 32, **config["text_config"], "tie_word_embeddings": False}
    config["text_config"]["tie_word_embeddings"] = True
    a = build_model({**inner, "model_type": text}, "config.json")
    b = build_model(config, "config.json")
    assert a.layers == b.layers
    assert a.tied_head == b.tied_head
    assert derive(a, None).nbytes == derive(b, None).nbytes


def test_kimi_k2_5_is_kimi_k2_inside_a_wrapper_with_a_head_of_its_own() -> None:
    inner = {
        **json.loads((CASES / "kimi_k2.json").read_text()),
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
    }
    wrapped = {"model_type": "kimi_k25", "text_config": inner, "vision_config": {}}
    a, b = build_model(inner, "config.json"), build_model(wrapped, "config.json")
    assert a.layers == b.layers
    assert derive(a, None).nbytes == derive(b, None).nbytes
    assert b.layers_path == "language_model.model.layers"
