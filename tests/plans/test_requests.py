"""Requests and their window, compared with zinc's unit tests (src/gpu/memory_plan.zig)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.runtimes.zinc.requests import RequestBudget, plan_request

tokens = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("used", "remaining", "completion", "target"),
    [(100, 3996, 64, 164), (32, 4064, 64, 96), (4090, 6, 6, 4096), (5000, 0, 0, 4096)],
)
def test_budgets_of_requests_equal_zincs(
    used: int, remaining: int, completion: int, target: int
) -> None:
    plan = plan_request(used, 64, 4096)
    assert plan.remaining_tokens == remaining
    assert plan.budget == RequestBudget(completion, target)


@given(tokens, tokens, tokens)
def test_no_count_is_negative_or_beyond_the_capacity(
    used: int, requested: int, capacity: int
) -> None:
    plan = plan_request(used, requested, capacity)
    assert 0 <= plan.remaining_tokens <= capacity
    assert 0 <= plan.budget.completion_tokens <= min(requested, plan.remaining_tokens)
    assert plan.budget.context_tokens <= capacity
    assert used + requested <= capacity + plan.missing_tokens


@given(tokens, tokens, tokens)
def test_the_answer_agrees_with_the_budget(used: int, requested: int, capacity: int) -> None:
    plan = plan_request(used, requested, capacity)
    gets = plan.budget.completion_tokens
    assert (plan.admission == "admitted") == (used + requested <= capacity)
    assert (plan.admission == "shortened") == (0 < gets < requested)


@pytest.mark.parametrize(
    ("used", "requested", "answer"),
    [
        (32, 64, "admitted"),
        (4090, 64, "shortened"),
        (4096, 64, "refused"),
        (5000, 64, "refused"),
        (5000, 0, "refused"),
        (4096, 0, "admitted"),
    ],
)
def test_a_server_answers_with_its_token_budget(used: int, requested: int, answer: str) -> None:
    assert plan_request(used, requested, 4096).admission == answer


@pytest.mark.parametrize("counts", [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 0, 2**40 + 1)])
def test_a_count_out_of_range_is_rejected(counts: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="tokens: give from 0"):
        plan_request(*counts)
