"""Growing sessions: allocated, copied and shared bytes, and where a budget ends."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import kv_cache
from memfit.estimators.plans.sessions.plan import plan_growth
from memfit.estimators.results.growth import GrowthPlan, GrowthRow, Sessions
from memfit.estimators.runtimes.registry import get_runtime, list_runtimes
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel

SAMPLES = Path(__file__).parents[2] / "sample_configs"
TOKEN = 147_456  # Qwen3-8B at 16 bits: 36 layers x 8 heads x 2 x 128 x 2 bytes


def model(name: str = "qwen3-8b-4bit") -> SizedModel:
    return Catalog().sized(str(SAMPLES / f"{name}.yaml"))


def plan(sessions: Sessions, *names: str, budget: int | None = None) -> GrowthPlan:
    rules = [get_runtime(name) for name in names] or list(list_runtimes())
    return plan_growth(model(), sessions, rules, budget_bytes=budget)


def grown(sessions: Sessions, name: str, budget: int | None = None) -> GrowthRow:
    (rule,) = plan(sessions, name, budget=budget).rules
    return rule


def test_runtimes_with_equal_rules_share_a_row() -> None:
    found = plan(Sessions(turn_tokens=5000))
    names = [rule.runtimes for rule in found.rules]
    assert names[0] == ("mlx-lm", "mlx-swift-lm", "mlx-vlm", "lm-studio")
    (without_experts,) = found.undecided
    assert without_experts.runtime == "mlx-moe"
    every = {*sum(names, ()), "mlx-moe"}
    assert every == {runtime.name for runtime in list_runtimes()}


def test_the_last_step_equals_the_estimate() -> None:
    rule = grown(Sessions(turn_tokens=5000), "mlx-lm")
    one_by_one = Workload(prompt_tokens=1, max_tokens=4999)
    assert rule.allocated_bytes == kv_cache(model().model, one_by_one).nbytes == 5120 * TOKEN
    assert rule.held_bytes == 5000 * TOKEN


def test_doubling_peaks_at_three_times_the_old_size() -> None:
    rule = grown(Sessions(turn_tokens=5000), "foundry")
    assert rule.allocated_bytes == 8192 * TOKEN
    assert rule.peak_bytes == (4096 + 8192) * TOKEN
    assert (rule.growths, rule.copied_bytes) == (3, (2048 + 4096) * TOKEN)


def test_each_growth_step_copies_all_allocated_bytes() -> None:
    rule = grown(Sessions(turn_tokens=1024), "mlx-lm")
    assert (rule.growths, rule.copied_bytes) == (4, (256 + 512 + 768) * TOKEN)


def test_only_pages_of_the_prefix_are_shared() -> None:
    sessions = Sessions(sessions=4, prefix_tokens=1000, turns=2, turn_tokens=100)
    paged, stepped = grown(sessions, "vllm"), grown(sessions, "mlx-lm")
    assert paged.shared_bytes == 3 * 992 * TOKEN
    assert paged.allocated_bytes == (4 * 1200 - 3 * 992) * TOKEN
    assert stepped.shared_bytes == 0


def test_tokens_grow_by_turn_and_the_last_turn_has_the_total_bytes() -> None:
    rule = grown(Sessions(sessions=2, prefix_tokens=100, turns=3, turn_tokens=200), "foundry")
    assert [turn.tokens for turn in rule.turns] == [300, 500, 700]
    assert [turn.allocated_bytes for turn in rule.turns] == [2 * 2048 * TOKEN] * 3
    assert rule.turns[-1].allocated_bytes == rule.allocated_bytes


def test_the_budget_is_crossed_where_old_and_new_together_exceed_it() -> None:
    sessions = Sessions(turns=10, turn_tokens=1000)
    crossing = grown(sessions, "foundry", budget=6144 * TOKEN - 1).crossing
    assert crossing is not None
    assert (crossing.tokens, crossing.turn) == (2049, 3)
    assert crossing.alive_bytes == 6144 * TOKEN
    later = grown(sessions, "foundry", budget=6144 * TOKEN).crossing
    assert later is not None
    assert later.tokens == 4097


def test_a_session_within_the_budget_has_no_crossing() -> None:
    assert grown(Sessions(turn_tokens=2000), "vllm", budget=2000 * TOKEN).crossing is None


def test_a_window_stops_growing() -> None:
    gemma = model("gemma-3-27b")
    rules = [get_runtime("vllm"), get_runtime("foundry")]
    paged, doubled = plan_growth(gemma, Sessions(turn_tokens=32768), rules).rules
    full = 10 * 16 * 2 * 128 * 2
    windows = 52 * 16 * 2 * 128 * 2
    # vLLM keeps window - 1 tokens, those of a chunk and a page; Foundry knows no windows.
    assert paged.allocated_bytes == 32768 * full + (1024 + 2 * 2048 + 16) * windows
    assert doubled.allocated_bytes == 32768 * (full + windows)


def test_sessions_beyond_the_context_are_rejected() -> None:
    with pytest.raises(InputError, match="sessions of 5000 tokens exceed the context of 4096"):
        plan_growth(model(), Sessions(turn_tokens=5000), list_runtimes(), context=4096)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sessions": 0, "turn_tokens": 1},
        {"turns": 0, "turn_tokens": 1},
        {"turn_tokens": 0},
        {"prefix_tokens": -1, "turn_tokens": 1},
        {"turns": 100_000, "turn_tokens": 2**30},
    ],
)
def test_counts_out_of_range_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be from"):
        Sessions(**wrong)


@given(
    # mlx-moe runs no dense model.
    st.sampled_from([each.name for each in list_runtimes() if each.name != "mlx-moe"]),
    st.builds(
        Sessions,
        sessions=st.integers(1, 5),
        prefix_tokens=st.integers(0, 5000),
        turns=st.integers(1, 5),
        turn_tokens=st.integers(1, 3000),
    ),
)
def test_needed_bytes_never_exceed_allocated_bytes(name: str, sessions: Sessions) -> None:
    rule = grown(sessions, name)
    assert rule.held_bytes <= rule.allocated_bytes <= rule.peak_bytes
    sizes = [turn.allocated_bytes for turn in rule.turns]
    assert sizes == sorted(sizes)
    assert all(turn.held_bytes <= turn.allocated_bytes for turn in rule.turns)
