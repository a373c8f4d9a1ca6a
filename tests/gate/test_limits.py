"""Written limits, in integers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.gate.limit_values import LimitValue, parse_experts, parse_limit_value


@given(st.integers(0, 10**6 - 1), st.integers(0, 9), st.data(), st.integers(0, 2**60))
def test_a_share_is_exact_in_every_notation(
    whole: int, digits: int, data: st.DataObject, of: int
) -> None:
    decimals = data.draw(st.integers(0, 10**digits - 1))
    text = f"{whole}.{decimals:0{digits}d}%" if digits else f"{whole}%"
    share = Fraction(text[:-1]) / 100
    allowance = parse_limit_value(text)
    assert allowance.most(of) <= share * of < allowance.most(of) + 1
    assert allowance.least(of) - 1 < share * of <= allowance.least(of)


@pytest.mark.parametrize(("text", "nbytes"), [("16GB", 16 * 10**9), ("1MiB", 2**20), ("7B", 7)])
def test_a_size_limit_does_not_depend_on_the_reference(text: str, nbytes: int) -> None:
    assert parse_limit_value(text).most(5) == parse_limit_value(text).least(10**12) == nbytes


def test_zero_needs_no_unit_and_experts_take_numbers() -> None:
    assert parse_limit_value(0) == LimitValue("0", Fraction(0))
    assert parse_experts(64).least(512) == 64
    assert parse_experts("12.5%").least(100) == 13


@pytest.mark.parametrize("value", [90, 1.5, True, None, "90", "90 percent", "-5%", "%", "1e3%", []])
def test_an_amount_without_a_unit_is_rejected(value: object) -> None:
    with pytest.raises(InputError):
        parse_limit_value(value)


@pytest.mark.parametrize("value", [0, -1, True, "8GB", "64", 2**21, None])
def test_experts_are_a_count_or_a_share(value: object) -> None:
    with pytest.raises(InputError):
        parse_experts(value)
