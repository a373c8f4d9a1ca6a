"""Published sizes of mixtures of experts, and configs that mlx-lm's classes would misread."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import build_model
from memfit.estimators.arch.specs import Growth
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import ConfigError, MemfitError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import buffer_counts, grown, kv_cache
from memfit.estimators.weights.derived import QuantizationPlan, derive
from tests.models import sample_config

_CASES = Path(__file__).parent / "cases"

MINIMAX_M2_5 = sample_config("minimax-m2.5-4bit")
# As published in the config.json of openai/gpt-oss-20b.
GPT_OSS_20B = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
DEEPSEEK_V3 = sample_config("deepseek-v3-4bit")


def _overridden(model: Model, ending: str, quantization: Quantization | None) -> dict[str, Any]:
    paths = (path for path, module in model.all_modules() if module.quantizable)
    return {path: quantization for path in paths if path.endswith(ending)}


def test_minimax_m2_5_in_4_bits_has_the_published_size() -> None:
    # metadata.total_size of a published 4-bit conversion with routers of 8 bits in groups of 32.
    model = build_model(MINIMAX_M2_5, "config.json")
    routers = _overridden(model, "block_sparse_moe.gate", Quantization(8, 32))
    assert len(routers) == 62
    assert derive(model, QuantizationPlan(Quantization(4, 64), routers)).nbytes == 128_666_664_960


def test_gpt_oss_20b_as_published_quantises_only_its_experts() -> None:
    # metadata.total_size of openai/gpt-oss-20b: MXFP4 experts, the rest bfloat16.
    model = build_model(GPT_OSS_20B, "config.json")
    plain = _overridden(model, "", None)
    kept = {path: None for path in plain if ".mlp.experts." not in path}
    mxfp4 = Quantization(4, 32, "mxfp4")
    assert derive(model, QuantizationPlan(mxfp4, kept)).nbytes == 13_761_264_768


def test_sliding_layers_of_gpt_oss_need_the_window_and_a_chunk_in_prefill() -> None:
    buffers = buffer_counts(build_model(GPT_OSS_20B, "config.json"), None).elements()
    rotating = [buffer for buffer in buffers if buffer.growth is Growth.ROTATING]
    first = [grown(buffer, 0, 0, 2048) for buffer in rotating]
    second = [grown(buffer, 2048, 2048, 2048) for buffer in rotating]
    assert (first, second) == ([2048] * 12, [127 + 2048] * 12)
    token_bytes = sum(buffer.elements_per_token * 2 for buffer in rotating)
    assert token_bytes * (127 + 2048) == 53_452_800


def test_deepseek_v3_caches_one_latent_and_one_rope_key_per_token() -> None:
    cache = kv_cache(build_model(DEEPSEEK_V3, "config.json"), Workload(prompt_tokens=32_768))
    assert cache.nbytes == 61 * 32_768 * (512 + 64) * 2 == 2_302_672_896  # 2.14 GiB


def test_quantising_a_latent_cache_is_rejected() -> None:
    workload = Workload(prompt_tokens=6000, kv_bits=8)
    with pytest.raises(UnsupportedError, match="deepseek_v3"):
        kv_cache(build_model(DEEPSEEK_V3, "config.json"), workload)


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("mixtral", {"num_key_value_heads": 4}, "num_attention_heads"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("mixtral", {"head_dim": 64}, "head_dim"),
        ("mixtral", {"hidden_size": 5}, "num_attention_heads"),
        ("phimoe", {"lm_head_bias": False}, "lm_head_bias"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("minimax", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("minimax", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
        ("ernie4_5_moe", {"moe_layer_end_index": -1}, "moe_layer_end_index"),
        ("hunyuan", {"moe_topk": [1, 2]}, "moe_topk"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gpt_oss_default_layers", {"num_hidden_layers": 5}, "num_hidden_layers"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [1, 1, 1, 1]}, "hybrid_layer_pattern"),
        ("step3p5", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("step3p5", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("step3p5", {"moe_layers_enum": "1,x"}, "moe_layers_enum"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2}, "indexer_types"),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types"),
        ("minicpm3", {"v_head_dim": 64}, "v_head_dim"),
    ],
)
def test_a_value_the_class_would_misread_is_reported(
    case: str, change: dict[str, Any], named: str
) -> None:
    config: dict[str, Any] = json.loads((_CASES / f"{case}.json").read_text())
    build_model(config, "config.json")
    with pytest.raises((ConfigError, UnsupportedError), match=rf"^config\.json: .*{named}"):
        build_model({**config, **change}, "config.json")


@pytest.mark.parametrize("value", ["x", -1, 2.5, True, 10**30, [], {}])
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "deepseek_v32", "hunyuan", "step3p5"])
def test_a_hostile_value_under_any_key_is_read_or_gives_a_one_line_error(
    case: str, value: object
) -> None:
    config: dict[str, Any] = json.loads((_CASES / f"{case}.json").read_text())
    messages = [_error_of({**config, key: value}) for key in config]
    assert any(messages)
    assert all("\n" not in message for message in messages)


def _error_of(config: dict[str, Any]) -> str:
    try:
        derive(build_model(config, "config.json"), None)
    except MemfitError as error:
        return str(error)
    return ""
