"""Hybrid and recurrent families: published sizes, and configs their classes cannot run."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.weights.derived import QuantizationPlan, derive

CASES = Path(__file__).parent / "cases"


def _case(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    return config | changes


def test_mamba_2_8b_has_the_published_size() -> None:
    # metadata.total_size of state-spaces/mamba-2.8b-hf, float32.
    config = {
        "model_type": "mamba",
        "conv_kernel": 4,
        "hidden_size": 2560,
        "intermediate_size": 5120,
        "num_hidden_layers": 64,
        "state_size": 16,
        "time_step_rank": 160,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 50280,
        "torch_dtype": "float32",
    }
    assert derive(build_model(config, "config.json"), None).nbytes == 11_073_382_400


def test_lfm2_experts_in_4_bits_have_the_published_size() -> None:
    # metadata.total_size of an 8B-A1B in MLX 4-bit; its vocabulary has 128,000 tokens.
    attention_layers = {2, 6, 10, 14, 18, 21}
    config = _case(
        "lfm2_moe",
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=7168,
        moe_intermediate_size=1792,
        num_experts=32,
        num_experts_per_tok=4,
        num_dense_layers=2,
        conv_L_cache=3,
        vocab_size=128000,
        layer_types=["full_attention" if i in attention_layers else "conv" for i in range(24)],
    )
    model = build_model(config, "config.json")
    plan = QuantizationPlan(Quantization(4, 64), converting=True)
    assert derive(model, plan).nbytes == 4_764_197_120


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("jamba", "attn_layer_offset", 3),
        ("jamba_dense", "layers_block_type", ["mamba", "mamba"]),
        ("lfm2", "full_attn_idxs", [0, 1, 2, 3]),
        ("lfm2", "full_attn_idxs", [4]),
        ("nemotron_h", "hybrid_override_pattern", "M-EMM"),
        ("nemotron_h", "hybrid_override_pattern", "M*"),
        ("granitemoehybrid", "layer_types", ["mamba", "attention", "conv"]),
        ("granitemoehybrid", "layer_types", ["mamba"]),
        ("granitemoehybrid", "mamba_n_groups", 4),
        ("falcon_h1", "mamba_d_ssm", 96),
        ("mamba", "conv_kernel", 1),
        ("recurrent_gemma", "lru_width", 128),
        ("recurrent_gemma", "num_key_value_heads", 3),
        ("rwkv7", "head_dim", 48),
        ("qwen3_next", "full_attention_interval", 6),
        ("qwen3_5_moe", "layer_types", ["full_attention"] * 3),
        ("qwen3_5", "text_config", None),
        ("kimi_linear", "num_experts_per_token", 7),
    ],
)
def test_a_value_the_class_cannot_run_is_rejected_with_its_key(
    name: str, key: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=key):
        build_model(_case(name, **{key: value}), "config.json")


def test_a_tied_head_declared_only_at_the_root_is_rejected() -> None:
    config = _case("qwen3_5")
    del config["text_config"]["tie_word_embeddings"]
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        build_model(config, "config.json")


def test_a_router_is_rejected_when_groups_do_not_divide_it() -> None:
    config = _case("lfm2_moe", hidden_size=96)
    plan = QuantizationPlan(Quantization(4, 32), converting=True)
    with pytest.raises(UnsupportedError, match=r"feed_forward\.gate"):
        derive(build_model(config, "config.json"), plan)


def test_mlx_rejects_that_router_too() -> None:
    pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
    from tests.oracle import Oracle

    with pytest.raises(ValueError, match="divisible"):
        Oracle(_case("lfm2_moe", hidden_size=96)).quantize(4, 32)
