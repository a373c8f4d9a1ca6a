"""The plots of a sweep: distinct labels at the ends of an axis, numbers with units."""

import pytest

from memfit.cli.render.chart import axis_ends
from memfit.estimators.base.units import Units


@pytest.mark.parametrize(
    ("least", "most", "ends"),
    [
        (1_600_000, 2_600_000, ("1.6 MB", "2.6 MB")),
        (1_600_000, 1_600_001, ("1600000 B", "1600001 B")),
        (1_600_000, 1_600_000, ("1.6 MB", "")),
    ],
)
def test_the_ends_of_an_axis_never_have_the_same_label(
    least: int, most: int, ends: tuple[str, str]
) -> None:
    assert axis_ends(least, most, Units.GB) == ends
