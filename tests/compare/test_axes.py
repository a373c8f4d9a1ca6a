"""The arithmetic of differences and the parsing of axes, for any input."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.compare.axes import parse_axis
from memfit.estimators.compare.compare import difference
from memfit.estimators.machine.device import OsRegime
from memfit.estimators.machine.devices import find_device
from memfit.estimators.results.comparison import AXES

sizes = st.integers(0, 2**60)


def axis_values(text: str) -> tuple[int | str | None, ...]:
    axis = parse_axis(text, find_device=find_device, os_regime=OsRegime.MACOS_26)
    return tuple(setting.value for setting in axis.settings)


@given(sizes, st.integers(1, 2**60))
def test_percent_is_the_nearest_hundredth_of_the_exact_share(value: int, first: int) -> None:
    found = difference(value, first)
    assert found.amount == value - first
    assert found.percent is not None
    exact = Fraction(100 * (value - first), first)
    # A float next to the nearest hundredth: the value printed with two decimals.
    assert abs(Fraction(found.percent) - exact) <= Fraction(1, 200) + abs(exact) / 2**50


@given(sizes)
def test_growth_from_zero_has_no_percent(value: int) -> None:
    assert difference(value, 0).percent == (None if value else 0.0)


def test_values_of_an_axis_keep_their_order() -> None:
    assert axis_values("context=32k, 4k,1m") == (32768, 4096, 1048576)
    assert axis_values("kv-bits=8,none") == (8, None)
    assert axis_values("quantize=MXFP4,4") == ("mxfp4", 4)
    assert axis_values("device=m4-max-64,rtx-4090") == ("m4-max-64", "rtx-4090")
    assert axis_values("memory=64GB") == ("64GB",)


@given(st.text() | st.builds("{}={}".format, st.sampled_from(AXES), st.text()))
def test_any_text_is_an_axis_or_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert axis_values(text)


def test_a_device_under_two_names_counts_as_two_values() -> None:
    with pytest.raises(InputError, match="twice"):
        axis_values("device=m4-max-64,m4-max-64")
