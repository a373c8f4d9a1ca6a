"""Published peaks of one rank of several, by formula; benchmarks/published_ranks.py has both."""

from typing import Any

import pytest

from benchmarks.published_ranks import predict, predict_range, read_rows

every_row = pytest.mark.parametrize(
    "row",
    # Of each model and way one row in `make test`.
    [
        pytest.param(row, marks=() if number % 4 == 0 else pytest.mark.exhaustive)
        for number, row in enumerate(read_rows())
    ],
    ids=lambda row: f"{row['model']}-{row['ranks']}-{row['parallel']}-{row['prompt_tokens']}",
)
# The rows are printed with one decimal.
ROUNDING = 5 * 10**7


@every_row
def test_the_formula_meets_published_peaks_of_ranks(row: dict[str, Any]) -> None:
    assert abs(predict(row, "formula") / (row["peak_gb"] * 1e9) - 1) < 0.02


@every_row
def test_the_stated_range_contains_published_peaks_of_ranks(row: dict[str, Any]) -> None:
    lowest, highest = predict_range(row, "formula")
    assert lowest - ROUNDING <= row["peak_gb"] * 1e9 <= highest + ROUNDING
