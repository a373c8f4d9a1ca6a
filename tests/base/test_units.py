"""Sizes that could mean something else are rejected."""

import pytest

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_size


@pytest.mark.parametrize("text", ["10Gb", "10 Gb", "10Gib", "1.5Mb"])
def test_a_size_in_bits_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match="in bits; write bytes with a capital B"):
        parse_size(text)


@pytest.mark.parametrize("unit", ["mb", "mB", "mib", "miB"])
def test_a_size_in_thousandths_or_megabits_is_ambiguous(unit: str) -> None:
    with pytest.raises(InputError, match=r"ambiguous; write megabytes as 10M(i?)B$"):
        parse_size(f"10{unit}")


def test_the_case_of_other_units_does_not_matter() -> None:
    assert parse_size("10GB") == parse_size("10gb") == 10**10
