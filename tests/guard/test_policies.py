"""Policies of the wired limit.

The goldens are mlx-swift-lm's own tests (Tests/MLXLMTests/WiredMemoryPolicyTests.swift) and, for
pairs, those of SpeculativeDecodingMemoryPolicy.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.guard.policies import (
    BudgetPolicy,
    FixedPolicy,
    MaxPolicy,
    OverBudget,
    SpeculativePolicy,
    SumPolicy,
)

amounts = st.integers(0, 2**48)
sizes = st.lists(amounts, max_size=8)
caps = st.none() | amounts


def test_the_sum_is_limited_by_its_cap() -> None:
    policy = SumPolicy(200)
    assert policy.limit(100, [50, 100]) == 200
    assert policy.admits(100, [50], 50)
    assert not policy.admits(100, [50], 51)


def test_max_of_mlx_swift_lm_is_the_larger_of_baseline_and_ticket() -> None:
    policy = MaxPolicy()
    assert policy.limit(100, [20, 150, 60]) == 150
    assert policy.limit(200, [20, 150, 60]) == 200
    assert policy.limit(200, []) == 200


def test_max_of_mlx_swift_adds_to_the_baseline() -> None:
    policy = MaxPolicy(on_baseline=True)
    assert policy.limit(100, [20, 150, 60]) == 250
    assert policy.limit(100, []) == 100


def test_fixed_ignores_running_tickets() -> None:
    assert FixedPolicy(123).limit(100, [50, 100]) == 123


def test_budget_adds_its_base() -> None:
    policy = BudgetPolicy(100, 300)
    assert policy.limit(50, [75]) == 225
    assert policy.admits(50, [75], 75)
    assert not policy.admits(50, [75], 76)


@pytest.mark.parametrize("policy", [MaxPolicy(), MaxPolicy(on_baseline=True), FixedPolicy(1)])
def test_max_and_fixed_always_admit(policy: MaxPolicy | FixedPolicy) -> None:
    assert policy.admits(2**60, [2**60], 2**60, recommended=1)


def test_without_a_cap_the_recommended_working_set_is_the_cap() -> None:
    assert SumPolicy().limit(0, [70, 70], recommended=100) == 100
    assert SumPolicy().admits(0, [70], 30, recommended=100)
    assert not SumPolicy().admits(0, [70], 31, recommended=100)
    assert SumPolicy().limit(0, [70, 70]) == 140
    assert SumPolicy(500).limit(0, [70, 70], recommended=100) == 140


@given(amounts, sizes, amounts, caps, caps, amounts)
def test_an_admitted_ticket_is_never_clamped(
    baseline: int, held: list[int], size: int, cap: int | None, recommended: int | None, base: int
) -> None:
    for policy, extra in ((SumPolicy(cap), 0), (BudgetPolicy(base, cap), base)):
        whole = baseline + extra + sum(held) + size
        admitted = policy.admits(baseline, held, size, recommended)
        assert admitted == (policy.limit(baseline, [*held, size], recommended) == whole)
        bound = recommended if cap is None else cap
        assert bound is None or policy.limit(baseline, held, recommended) <= bound


def test_equal_policies_form_one_group_and_budgets_group_by_name() -> None:
    assert SumPolicy(200) == SumPolicy(200) != SumPolicy(201)
    assert SumPolicy(200, group="a") != SumPolicy(200, group="b")
    assert BudgetPolicy(100) != BudgetPolicy(100)
    assert BudgetPolicy(100, group="a") == BudgetPolicy(200, 300, group="a")


def test_a_pair_within_its_limit_uses_the_draft_model() -> None:
    pair = SpeculativePolicy(1000, 100).evaluate(600, 250)
    assert (pair.estimated_bytes, pair.fits, pair.use_draft) == (950, True, True)
    assert SpeculativePolicy(950, 100).evaluate(600, 250).fits


@pytest.mark.parametrize(
    ("over_budget", "use_draft"), [("allow", True), ("fallback", False), ("fail", False)]
)
def test_the_over_budget_setting_decides_for_a_pair_above_its_limit(
    over_budget: OverBudget, use_draft: bool
) -> None:
    pair = SpeculativePolicy(1000, 100, over_budget).evaluate(600, 350)
    assert (pair.estimated_bytes, pair.fits, pair.use_draft) == (1050, False, use_draft)


def test_a_pair_without_a_limit_uses_the_working_set_or_none() -> None:
    assert not SpeculativePolicy().evaluate(600, 250, recommended=800).fits
    assert SpeculativePolicy().evaluate(600, 250).fits


def test_negative_amounts_are_rejected() -> None:
    for make in (SumPolicy, FixedPolicy, BudgetPolicy, SpeculativePolicy):
        with pytest.raises(InputError, match="must not be negative"):
            make(-1)
