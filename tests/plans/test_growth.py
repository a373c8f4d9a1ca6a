"""Growing caches, compared with constants and tests of the runtimes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.mlx.kv_cache import grown_singly
from memfit.estimators.runtimes.agent_memory import adaptive_chunk, block_bytes
from memfit.estimators.runtimes.auto_context import pool_context
from memfit.estimators.runtimes.foundry import foundry_context
from memfit.estimators.runtimes.growth import (
    GrowthRule,
    align_capacity,
    growth_events,
    last_growth,
    rule_of,
)
from memfit.estimators.runtimes.registry import get_runtime, list_runtimes

MIB = 2**20
FOUNDRY = rule_of(get_runtime("foundry"))


@pytest.mark.parametrize(
    ("tokens", "capacity"), [(0, 128), (1, 128), (127, 128), (128, 128), (129, 256), (200, 256)]
)
def test_capacities_are_aligned_up(tokens: int, capacity: int) -> None:
    # Foundry, ContextConfig::align_capacity, test_alignment.
    assert align_capacity(tokens) == capacity


def test_foundry_starts_at_2048_and_doubles() -> None:
    assert [event.after for event in growth_events(FOUNDRY, 10_000)] == [2048, 4096, 8192, 16384]


def test_growing_needs_old_and_new_three_times_the_old_size() -> None:
    _, second, *_ = growth_events(FOUNDRY, 10_000)
    assert (second.before, second.after, second.alive) == (2048, 4096, 3 * 2048)
    assert second.copied == 2048


def test_doubling_stops_at_the_longest_context() -> None:
    # Foundry, ensure_kv_capacity: min(max_context_len), then aligned up.
    rule = GrowthRule("doubling", 128, 2048, most=5000)
    assert last_growth(rule, 4097).after == 5120


def test_foundrys_own_test_values_are_reproduced() -> None:
    # Foundry, test_memory_estimation: d_model 512, 8 heads, 2 KV heads, 4 layers, 2048 tokens.
    layers, kv_heads, head_dim = 4, 2, 512 // 8
    token = layers * 2 * kv_heads * head_dim * 2
    assert token * last_growth(FOUNDRY, 2048).after == 4_194_304


def test_aligning_up_after_dividing_exceeds_the_budget() -> None:
    found = foundry_context(1000 * 1024, 1024, 100_000)
    assert (found.tokens, found.right_tokens) == (1024, 896)
    assert found.reason == (
        "Foundry aligns up after dividing: 24576 bytes above its budget of 1024000"
    )


def test_a_budget_of_whole_alignments_gives_both_rules_the_same_context() -> None:
    found = foundry_context(1024 * 1024, 1024, 100_000)
    assert (found.tokens, found.right_tokens, found.reason) == (1024, 1024, "")


def test_a_budget_below_one_token_gives_foundry_one_token() -> None:
    found = foundry_context(100, 1024, 4096)
    assert (found.tokens, found.right_tokens) == (1, 0)


def test_the_context_limit_of_the_model_applies_to_a_large_budget() -> None:
    assert foundry_context(2**40, 1024, 4000).tokens == 4000


@pytest.mark.parametrize(("heads", "bits", "nbytes"), [(8, 4, 589_824), (8, 16, 2_097_152)])
def test_blocks_have_256_tokens_for_256_wide_heads(heads: int, bits: int, nbytes: int) -> None:
    # agent-memory, tests of ModelCacheSpec.bytes_per_block_per_layer.
    elements = 256 * heads * 256
    assert block_bytes(elements, elements, bits=bits) == nbytes


def test_blocks_for_64_wide_heads() -> None:
    elements = 256 * 8 * 64
    assert block_bytes(elements, elements) == 147_456


def test_four_bits_take_0_28125_of_sixteen_bits() -> None:
    elements = 256 * 8 * 128
    plain = block_bytes(elements, elements, bits=16)
    assert block_bytes(elements, elements) * 32 == plain * 9


def test_a_pool_of_8192_mib_has_14563_blocks() -> None:
    assert 8192 * MIB // block_bytes(256 * 8 * 256, 256 * 8 * 256) == 14_563


def test_a_pool_holds_whole_pages() -> None:
    assert pool_context(1000, 10, 4096, 16).right_tokens == 96
    assert pool_context(-5, 10, 4096, 16).right_tokens == 0


@pytest.mark.parametrize(
    ("position", "chunk"),
    [
        (0, 4096),
        (1999, 4096),
        (2000, 2048),
        (7999, 2048),
        (8000, 1024),
        (19999, 1024),
        (20000, 512),
    ],
)
def test_chunks_shrink_as_the_cache_grows(position: int, chunk: int) -> None:
    # agent-memory, adaptive_chunk_size.
    assert adaptive_chunk(position, largest=4096, least=512) == chunk


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 2304, 5000])
def test_steps_equal_those_of_mlx_lms_own_cache(tokens: int) -> None:
    rule = rule_of(get_runtime("mlx-lm"))
    assert last_growth(rule, tokens).after == grown_singly(KVBuffer(8, 128, 128), 0, 0, tokens)


def test_pages_are_never_copied() -> None:
    events = list(growth_events(rule_of(get_runtime("vllm")), 1000))
    assert len(events) == 63
    assert all(event.copied == 0 and event.alive == event.after for event in events)


def test_a_contiguous_cache_is_fully_allocated_from_the_first_token() -> None:
    (event,) = growth_events(rule_of(get_runtime("llama.cpp"), most=5000), 4000)
    assert (event.tokens, event.after, event.copied) == (1, 5120, 0)


@given(st.sampled_from(list_runtimes()), st.integers(1, 20_000), st.none() | st.integers(1, 30_000))
def test_capacity_holds_the_tokens_and_never_shrinks(
    runtime: object, tokens: int, most: int | None
) -> None:
    rule = rule_of(runtime, most=max(tokens, most) if most else tokens)  # type: ignore[arg-type]
    capacities = [event.after for event in growth_events(rule, tokens)]
    assert capacities[-1] >= tokens
    assert capacities == sorted(capacities)
    assert all(capacity % rule.step == 0 for capacity in capacities)
    assert capacities[-1] == last_growth(rule, tokens).after


@given(st.integers(0, 2**45), st.integers(1, 2**24), st.integers(1, 2**20))
def test_the_correct_context_never_exceeds_the_budget(
    budget: int, token: int, ceiling: int
) -> None:
    found = foundry_context(budget, token, ceiling)
    assert found.right_tokens * token <= budget
    assert found.right_tokens <= (found.tokens or 0)
    assert pool_context(budget, token, ceiling, 16).right_tokens * token <= budget
