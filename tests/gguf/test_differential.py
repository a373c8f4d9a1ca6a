"""memfit against llama.cpp for models and settings that are drawn at random.

`python -m benchmarks.llama_differential` compares 5,000 draws.
"""

import pytest

pytest.importorskip(
    "xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp==2026.10.11549"
)

from benchmarks.llama_differential import outcomes

DRAWS, SEED = 300, 38


@pytest.mark.exhaustive
def test_caches_are_equal_and_compute_buffers_near_in_random_contexts() -> None:
    found = list(outcomes(DRAWS, SEED))
    assert [each for each in found if not each.is_equal] == []
    whole = [each for each in found if each.is_whole and each.percent is not None]
    usual = [each.percent or 0.0 for each in whole if each.run.microbatch >= 256]
    # docs/gguf.md states the errors of 5,000 draws.
    assert len(usual) > 100
    assert sum(abs(percent) <= 5 for percent in usual) >= 0.88 * len(usual)
    assert -25 < min(usual) <= max(usual) < 30
