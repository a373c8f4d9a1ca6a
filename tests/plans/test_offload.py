"""Cached conversations, compared with agent-memory's constants and its corrected review."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.base.errors import InputError
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.plans.offload.cache_tiers import milliseconds
from memfit.estimators.plans.offload.plan import OffloadQuestion, plan_offload
from memfit.estimators.plans.offload.session_cache import (
    Storage,
    longest_hot,
    storage_of,
    streaming_peak,
)
from memfit.estimators.results.offload import OffloadPlan, Speeds
from memfit.estimators.sizing.opening import size

SAMPLES = Path(__file__).parents[2] / "sample_configs"
# The review of DeepSeek-Coder-V2-Lite in agent-memory takes 27 layers of 8 heads of 256.
REVIEWED = Storage((KVBuffer(8, 256, 256),) * 27, state_bytes=0, plain_bytes=2)
MIB = 2**20


def storage(sample: str, bits: int = 4, *, in_blocks: bool = False) -> Storage:
    sized = size(open_checkpoint(str(SAMPLES / f"{sample}.yaml")), device=None)
    return storage_of(sized.model, bits=bits, group_size=64, in_blocks=in_blocks)


def planned(kept: Storage, question: OffloadQuestion, device: Device | None = None) -> OffloadPlan:
    sample = SAMPLES / "deepseek-v2-lite.yaml"
    return plan_offload(size(open_checkpoint(str(sample)), device=device), kept, question)


@pytest.mark.parametrize(
    ("shape", "bits", "nbytes"),
    [
        (KVBuffer(8, 256, 256), 4, 589_824),
        (KVBuffer(8, 64, 64), 4, 147_456),
        (KVBuffer(8, 256, 256), 16, 2_097_152),
    ],
)
def test_a_block_has_the_bytes_agent_memory_counts(shape: KVBuffer, bits: int, nbytes: int) -> None:
    # agent-memory, tests of ModelCacheSpec.
    for in_blocks in (False, True):
        kept = Storage((shape,), 0, 2, bits, in_blocks=in_blocks)
        assert kept.block_bytes(shape) == kept.stored_bytes(256) == nbytes


def test_four_bits_take_28_percent_and_save_71_9() -> None:
    plain, stored = (REVIEWED.exact_bytes(256, bits) for bits in (16, 4))
    assert stored / plain == 0.28125
    assert round(100 * (1 - stored / plain), 1) == 71.9


def test_the_pool_is_the_budget_in_whole_blocks() -> None:
    # agent-memory: 8192 MiB // 589,824.
    pool = planned(REVIEWED, OffloadQuestion(1, 256, hot_bytes=8192 * MIB)).pool
    assert pool is not None
    assert (pool.block_bytes, pool.blocks) == (589_824, 14_563)


def test_deepseek_coder_v2_lite_has_16_heads_with_keys_of_192() -> None:
    kept = storage("deepseek-v2-lite")
    assert len(kept.buffers) == 27
    assert kept.kinds == ((KVBuffer(16, 192, 128), 27),)
    assert (kept.exact_bytes(1, 16), kept.exact_bytes(1, 4)) == (276_480, 77_760)
    assert round(kept.exact_bytes(18_000, 16) / 1e9, 2) == 4.98


def test_8k_tokens_of_the_review_take_more_than_200_megabytes() -> None:
    # The review's own shapes give 1.81 GB, those of the model 2.26.
    assert round(REVIEWED.exact_bytes(8192, 16) / 1e9, 2) == 1.81
    assert round(storage("deepseek-v2-lite").exact_bytes(8192, 16) / 1e9, 3) == 2.265


def test_streaming_restores_in_4_06_gigabytes_and_bulk_in_5_15() -> None:
    # 71 blocks are 18,176 tokens; the 18,000 of the review alone take 4.02 and 5.10.
    bulk, streaming = REVIEWED.restore(18_000, ANY_MAC)
    assert (round(bulk / 1e9, 2), round(streaming / 1e9, 2)) == (5.15, 4.06)
    assert REVIEWED.restore(18_176, ANY_MAC) == (bulk, streaming)


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(0, 300)), min_size=1, max_size=20))
def test_streaming_never_needs_more_than_bulk(layers: list[tuple[int, int]]) -> None:
    plain, stored = [p for p, _ in layers], [s for _, s in layers]
    peak = streaming_peak(plain, stored, plain)
    by_hand = max(sum(plain[: index + 1]) + sum(stored[index:]) for index in range(len(layers)))
    assert peak == by_hand <= sum(plain) + sum(stored)
    assert peak >= sum(plain)


def test_unquantised_sessions_are_restored_unchanged() -> None:
    kept = storage("llama-3.1-8b", bits=16)
    assert kept.restore(1000, ANY_MAC) == (134_217_728, 134_217_728)


@pytest.mark.parametrize("prefill", [730, 1020])
def test_a_reload_is_20_to_28_times_as_fast_as_prefill_not_400(prefill: int) -> None:
    # 18,000 tokens; a disk that reads 3.5 and writes 2 GB a second; decoding at 50 tokens a
    # second gave the review its 400.
    speeds = Speeds(3_500_000_000, 2_000_000_000, prefill)
    times = planned(REVIEWED, OffloadQuestion(1, 18_000, speeds=speeds)).times
    assert (times.load_ms, times.save_ms) == (324, 566)
    assert times.times_faster is not None
    assert 19.5 < times.times_faster < 28.5


# agent-memory: tokens and seconds to the first token, without a cache.
@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        ((1024, 2048, 4096), (3.96, 7.12, 15.7)),  # Gemma3-12B
        ((1024, 2048, 4096), (2.50, 4.53, 10.2)),  # Llama-3.1-8B
    ],
)
def test_prefill_time_grows_with_the_tokens(
    tokens: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    speed = round(sum(tokens) / sum(seconds))
    for count, measured in zip(tokens, seconds, strict=True):
        expected = milliseconds(count, speed)
        assert expected is not None
        assert expected / 1000 == pytest.approx(measured, rel=0.1)


def test_a_published_reload_takes_a_small_part_of_its_prefill_time() -> None:
    # Gemma3-12B, 4K: 0.58 s from disk; the plan has less, because it only counts the read.
    kept = storage("llama-3.1-8b")
    read = milliseconds(kept.stored_bytes(4096), 3_500_000_000)
    assert read is not None
    assert read < 290


def test_the_next_chunk_depends_on_the_length_of_the_session() -> None:
    rows = planned(REVIEWED, OffloadQuestion(1, 20_000)).sizes
    chunks = {row.tokens: row.next_chunk_tokens for row in rows}
    assert [chunks[n] for n in (1024, 2048, 8192, 20_000)] == [4096, 2048, 1024, 512]


@given(st.integers(1, 50), st.integers(0, 10**11))
def test_the_hot_threshold_is_the_longest_length_at_which_all_sessions_fit(
    conversations: int, budget: int
) -> None:
    tokens = longest_hot(REVIEWED, conversations, budget, 131_072)
    assert tokens % 256 == 0
    assert conversations * REVIEWED.stored_bytes(tokens) <= budget
    longer = conversations * REVIEWED.stored_bytes(tokens + 256)
    assert longer > budget or tokens + 256 > 131_072


def test_the_fixed_threshold_is_reported_with_its_true_bytes() -> None:
    threshold = planned(REVIEWED, OffloadQuestion(4, 1000, hot_bytes=10**9)).threshold
    assert threshold.fixed_plain_bytes == 1_811_939_328
    assert threshold.tokens == 3840


def test_the_budget_is_the_rest_of_nine_tenths_of_the_working_set() -> None:
    device = memory_device(64 * 10**9)
    plan = planned(REVIEWED, OffloadQuestion(1, 256), device)
    assert plan.pool is not None
    assert plan.pool.budget_bytes == device.working_set_bytes * 9 // 10 - plan.active_bytes > 0


def test_the_disk_needs_a_fifth_more_than_is_written() -> None:
    question = OffloadQuestion(10, 256, disk_bytes=12 * 27 * 589_824)
    disk = planned(REVIEWED, question).disk
    assert disk.stored_bytes == 10 * 27 * 589_824
    assert disk.with_reserve_bytes == 12 * 27 * 589_824
    assert disk.conversations == 10


def test_a_window_stores_only_its_own_tokens() -> None:
    kept = storage("gemma-3-27b", in_blocks=True)
    longer = kept.exact_bytes(9000, 16) - kept.exact_bytes(8000, 16)
    full = [buffer for buffer in kept.buffers if buffer.limit is None]
    assert longer == 1000 * sum(2 * buffer.elements_per_token for buffer in full)
    assert "windows" in {note.code for note in planned(kept, OffloadQuestion(1, 1)).notes}


def test_mlx_lm_stores_a_window_exactly() -> None:
    kept, blocks = (storage("gemma-3-27b", in_blocks=each) for each in (False, True))
    windows = [buffer for buffer in kept.buffers if buffer.limit]
    saved = sum(
        2 * buffer.elements_per_token * 1024 - blocks.block_bytes(buffer) * 4 for buffer in windows
    )
    assert kept.exact_buffers == len(windows) == 52
    assert kept.stored_bytes(9000) - blocks.stored_bytes(9000) == saved
    assert kept.restore(9000, ANY_MAC)[1] > blocks.restore(9000, ANY_MAC)[1]
    assert "stored-exactly" in {note.code for note in planned(kept, OffloadQuestion(1, 1)).notes}


def test_recurrent_states_are_stored_unchanged() -> None:
    kept = storage("qwen3-next-80b-a3b-4bit")
    assert kept.state_bytes == 77_266_944
    assert kept.exact_bytes(1000, 16) == 77_266_944 + 24_576_000
    assert kept.stored_bytes(1) == 77_266_944 + 12 * kept.block_bytes(kept.buffers[0])


def test_a_model_with_recurrent_states_only_has_no_blocks() -> None:
    plan = planned(storage("mamba-2.8b"), OffloadQuestion(2, 1000, hot_bytes=10**9))
    assert plan.pool is None
    assert plan.sizes[0].blocks == 0
    assert plan.sizes[0].stored_bytes == plan.state_bytes > 0


@pytest.mark.parametrize(("conversations", "tokens"), [(0, 1), (-1, 1), (10**7, 1), (1, 0)])
def test_an_impossible_question_is_rejected(conversations: int, tokens: int) -> None:
    with pytest.raises(InputError):
        OffloadQuestion(conversations, tokens)


@pytest.mark.parametrize(("bits", "group"), [(3, 64), (0, 64), (4, 48)])
def test_an_unsupported_storage_format_is_rejected(bits: int, group: int) -> None:
    with pytest.raises(InputError):
        Storage((KVBuffer(8, 64, 64),), 0, 2, bits, group)


def test_a_model_that_does_not_fit_is_reported_as_too_large() -> None:
    device = Device("small", "metal", 8 * 10**9, 5 * 10**9, None, "flag")
    plan = planned(REVIEWED, OffloadQuestion(1, 1000), device)
    assert (plan.hot_conversations, plan.threshold.tokens) == (0, 0)
    assert "too-large" in {note.code for note in plan.notes}


def test_a_session_larger_than_its_memory_is_always_read_from_disk() -> None:
    plan = planned(REVIEWED, OffloadQuestion(1, 1000, hot_bytes=1000))
    assert "no-hot" in {note.code for note in plan.notes}
