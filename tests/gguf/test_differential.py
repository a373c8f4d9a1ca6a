"""memfit against llama.cpp for models and settings that are drawn at random.

`python -m benchmarks.llama_differential` compares 5,000 draws.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp==2026.10.11549"
)

from benchmarks.llama_differential import outcomes
from memfit.estimators.arch.gguf.rules import RULES
from tests.gguf.writing import recorded

DRAWS, SEED = 300, 38
ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_caches_are_equal_and_compute_buffers_near_in_random_contexts() -> None:
    found = list(outcomes(DRAWS, SEED))
    assert [each for each in found if not each.is_equal] == []
    whole = [each.percent for each in found if each.is_whole and each.percent is not None]
    assert len(whole) > 150
    assert sum(abs(percent) <= 5 for percent in whole) >= 0.99 * len(whole)
    assert -10 < min(whole) <= max(whole) < 10
    # What is divided is a bound where small operations decide (compute.py, has_gap).
    divided = [each.percent for each in found if not each.is_whole and each.run.microbatch >= 256]
    assert all(percent is None or percent > -10 for percent in divided)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in RULES if name not in recorded()])
def test_every_architecture_has_llama_cpps_caches_and_buffers(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.llama_architectures", name]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if run.returncode < 0 or "not loaded" in run.stdout:
        pytest.skip("llama.cpp makes no context of a file of usual sizes")
    assert run.returncode == 0, run.stdout + run.stderr
