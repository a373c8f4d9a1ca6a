"""Published peaks of one rank of several, by formula; benchmarks/published_ranks.py has both."""

from typing import Any

import pytest

from benchmarks.published_ranks import predict, read_rows


@pytest.mark.parametrize(
    "row",
    list(read_rows()),
    ids=lambda row: f"{row['model']}-{row['ranks']}-{row['parallel']}-{row['prompt_tokens']}",
)
def test_the_formula_meets_published_peaks_of_ranks(row: dict[str, Any]) -> None:
    assert abs(predict(row, "formula") / (row["peak_gb"] * 1e9) - 1) < 0.05
