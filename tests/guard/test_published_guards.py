"""Guards of other servers that were reported wrong: what this one says of the same requests.

Each case has its issue. What came from those servers' own caches has no counterpart under mlx-lm:
recurrent snapshots (oMLX 3284: 27.28 KB a token were predicted, 237 KB measured), and the caches of
a class that mlx-lm 0.32.2 does not have (oMLX 2521: 237.3 GB predicted, 172 GB measured).
"""

import pytest

import memfit
from memfit.estimators.guard.guard import Admit, Refuse
from memfit.estimators.guard.state import Request, Row, State

GB = 10**9


@pytest.mark.parametrize(
    ("prompt", "reply", "predicted_gb"),
    [(10_693, 15, 6.3), (30, 256, 25.2), (30, 8192, None), (5300, 4000, 353.7)],
)
def test_a_longer_reply_costs_its_cache_and_no_more(
    prompt: int, reply: int, predicted_gb: float | None
) -> None:
    """github.com/jundot/omlx/issues/1885: Qwen3-30B-A3B at 4 bits, 24.96 GB; 17.4 GB when idle.

    Its guard predicted 80 MB for each token of the reply, and less than the weights without one.
    """
    guard = memfit.guard(memfit.open("qwen3-30b-a3b-4bit").on("m4-max-36"), "24.96GB")
    found = guard.preflight(prompt, reply)
    assert isinstance(found, Admit)
    assert 17 * GB < found.peak_bytes < 21 * GB
    if predicted_gb:
        assert not 17 * GB < predicted_gb * GB < 21 * GB


@pytest.mark.parametrize("prompt", [30_000, 60_000, 150_000])
def test_a_prompt_that_the_machine_serves_is_admitted(prompt: int) -> None:
    """github.com/jundot/omlx/issues/2434: 54 to 58 GB predicted, 27 to 28 GB active at 6 bits."""
    model = memfit.open("qwen3.5-35b-a3b", quantize=6).on("m4-max-64")
    found = memfit.guard(model, "54GB").preflight(prompt, 2000)
    assert isinstance(found, Admit)
    assert found.peak_bytes < 54 * GB


def test_a_decision_depends_on_no_earlier_one() -> None:
    """github.com/jundot/omlx/issues/2676, 3147 and 3858: a measured use or transient that stays.

    A guard that had seen a large request refused smaller ones for up to 27 hours.
    """
    guard = memfit.guard(memfit.open("qwen3-0.6b").on("m4-pro-24"), "8GB")
    state, request = State(decoding=(Row(900, 0, 300),)), Request(1000, 300)
    before = guard.admit(request, state)
    full = State(decoding=(Row(30_000, 0, 5000),), decode_bytes=5 * GB, other_bytes=2 * GB)
    assert not isinstance(guard.admit(request, full), Admit)
    assert guard.admit(request, state) == before
    assert isinstance(before, Admit)


def test_what_will_not_fit_is_refused_before_its_prefill_with_what_would() -> None:
    """github.com/youssofal/MTPLX/issues/421: refused after 43 to 437 s of prefill, no hint."""
    guard = memfit.guard(memfit.open("qwen3-8b-4bit").on("m4-pro-24"), "8GB")
    found = guard.preflight(38_000, 1000)
    assert isinstance(found, Refuse)
    assert found.largest_prompt > 1000
    assert isinstance(guard.preflight(found.largest_prompt, 1000), Admit)
