"""The whole command on a real model, compared with its estimate; docs/accuracy.md has more."""

from pathlib import Path

import pytest

from memfit.estimators.runtimes.source import TRACE_ERROR_PERCENT
from tests.checkpoints import Checkpoints
from tests.selection import quick

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")

from benchmarks.tune_vs_estimate import tuned

WORKLOAD = ("--prompt-tokens", "257", "--prefill-step", "128", "--max-tokens", "2")


@pytest.mark.parametrize("name", quick(["sharded", "hybrid"], ["sharded"]))
def test_tune_measures_the_estimated_figures(
    name: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    row = tuned(name, checkpoints(name), tmp_path, WORKLOAD)
    assert row.is_exact
    assert row.is_within_error
    unexplained = 100 * abs(row.unaccounted)
    assert unexplained <= TRACE_ERROR_PERCENT * row.figures["peak"].measured
