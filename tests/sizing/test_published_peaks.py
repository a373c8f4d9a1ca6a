"""Peaks that strangers published, by both methods; the rows name their sources."""

from typing import Any

import pytest

from benchmarks.published import ROWS, predict, read_rows
from memfit.estimators.base.errors import UnsupportedError

CONFIGS = ROWS / "configs"
PEAKS = read_rows(ROWS)
# A trace takes a second or more; these two have linear attention and a latent cache.
QUICK = ("GLM-4.7-Flash",)
every_row = pytest.mark.parametrize(
    "row", PEAKS, ids=lambda row: f"{row['model']}-{row['bits']}-{row['prompt_tokens']}"
)


def error(row: dict[str, Any], predicted: int) -> float:
    published: float = row["peak_gb"] * 1e9
    return abs(predicted / published - 1)


@every_row
def test_the_formula_meets_published_peaks(row: dict[str, Any]) -> None:
    try:
        assert error(row, predict(row, "formula", CONFIGS)) < 0.015
    except UnsupportedError:
        # The one class that formulas do not describe.
        assert row["model"] == "GLM-4.7-Flash"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row['model']}-{row['bits']}-{row['prompt_tokens']}",
            marks=() if row["model"] in QUICK else pytest.mark.exhaustive,
        )
        for row in PEAKS
    ],
)
def test_the_trace_meets_published_peaks(row: dict[str, Any]) -> None:
    pytest.importorskip("mlx_lm", reason="the classes that are traced are mlx-lm's")
    assert error(row, predict(row, "trace", CONFIGS)) < 0.005


def test_every_row_names_its_source() -> None:
    assert all(row["url"].startswith("https://") and row["kind"] == "clean" for row in PEAKS)
    assert {path.name for path in CONFIGS.iterdir()} == {row["config"] for row in PEAKS}
