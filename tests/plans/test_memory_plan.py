"""Contexts from fixed bytes and bytes per token, compared with zinc's unit tests and formulas.

Source of the goldens: zinc, src/gpu/memory_plan.zig and its tests as of 2026-06-12; the figures of
the 40-layer configuration were computed from its formulas by hand.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.checkpoint.local.samples import read_sample
from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile
from memfit.estimators.runtimes.zinc.memory_plan import (
    ModelConfig,
    auto_context_floor_tokens,
    auto_context_tokens_for_device_budget,
    fitting_context_tokens,
    model_config,
    profile,
)

SAMPLES = Path(__file__).parents[2] / "sample_configs"
GIB = 2**30
SMALL = RuntimeMemoryProfile(
    fixed_device_local_bytes=6144,
    fixed_host_visible_bytes=2048,
    device_local_bytes_per_token=256,
    host_visible_bytes_per_token=4,
)


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(
        n_layers=40,
        n_heads=16,
        n_kv_heads=2,
        head_dim=256,
        hidden_dim=2048,
        intermediate_dim=512,
        vocab_size=248320,
        context_length=32768,
        n_experts=256,
        n_experts_used=8,
        ssm_d_conv=4,
        ssm_d_inner=4096,
        ssm_d_state=128,
        ssm_dt_rank=32,
        ssm_n_group=16,
        shared_expert_intermediate_dim=512,
    )


def test_budgets_and_ceilings_limit_the_context() -> None:
    assert SMALL.max_context_tokens_for_device_local_budget(0, 8192, 32) == 8
    assert SMALL.max_context_tokens_for_device_local_budget(0, 16384, 16) == 16


def test_a_zero_ceiling_gives_no_context_and_zero_bytes_a_token_the_ceiling() -> None:
    free = RuntimeMemoryProfile(
        fixed_device_local_bytes=1,
        fixed_host_visible_bytes=0,
        device_local_bytes_per_token=0,
        host_visible_bytes_per_token=0,
    )
    assert SMALL.max_context_tokens_for_device_local_budget(0, 8192, 0) == 0
    assert free.max_context_tokens_for_device_local_budget(0, 2, 77) == 77
    assert free.max_context_tokens_for_device_local_budget(0, 1, 77) == 0


def test_totals_add_up() -> None:
    assert SMALL.runtime_host_visible_bytes(8) == 2080
    assert SMALL.total_device_local_bytes(1, 8) == 8193


def test_the_profile_of_a_hybrid_model_equals_zincs(config: ModelConfig) -> None:
    found = profile(config)
    assert found.fixed_device_local_bytes == 89_078_784
    assert found.fixed_host_visible_bytes == 1_018_944
    assert found.gpu_ssm_bytes == 87_818_240
    assert found.device_local_bytes_per_token == 163_840
    assert found.host_visible_bytes_per_token == 4


def test_automatic_context_of_21_gib_on_32(config: ModelConfig) -> None:
    found = profile(config)
    assert auto_context_tokens_for_device_budget(found, 21 * GIB, 32 * GIB, 262144) == 39_936


def test_the_minimum_context_applies_even_where_it_does_not_fit(config: ModelConfig) -> None:
    found = profile(config)
    assert auto_context_floor_tokens == 4096
    assert auto_context_tokens_for_device_budget(found, 21 * GIB, 24 * GIB, 262144) == 4096
    assert fitting_context_tokens(found, 21 * GIB, 24 * GIB, 262144) == 0
    assert auto_context_tokens_for_device_budget(found, 21 * GIB, 24 * GIB, 1000) == 1000
    assert auto_context_tokens_for_device_budget(found, 21 * GIB, 24 * GIB, 0) == 0


def test_the_zinc_config_comes_from_the_architecture(config: ModelConfig) -> None:
    sample = read_sample(SAMPLES / "qwen3.5-35b-a3b.yaml")
    config.context_length = 262144
    assert model_config(build_model(sample.config, sample.name)) == config


def test_layers_that_zinc_does_not_know_are_rejected() -> None:
    sample = read_sample(SAMPLES / "rwkv7-2.9b.yaml")
    with pytest.raises(UnsupportedError, match="rwkv layers have no place in zinc's memory plan"):
        model_config(build_model(sample.config, sample.name))


@given(st.integers(0, 2**40), st.integers(0, 2**42), st.integers(0, 2**20))
def test_the_largest_context_fits_and_one_more_does_not(
    weights: int, budget: int, ceiling: int
) -> None:
    ask, total = SMALL.max_context_tokens_for_device_local_budget, SMALL.total_device_local_bytes
    tokens = ask(weights, budget, ceiling)
    assert 0 <= tokens <= ceiling
    if tokens:
        assert total(weights, tokens) <= budget
    if tokens < ceiling:
        assert total(weights, tokens + 1) > budget
