"""What mlx-vlm keeps when a run has ended, against published runs on an M5 Max."""

from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("mlx_vlm", reason="the classes that are traced are mlx-vlm's")

from benchmarks.published_held import errors

PUBLISHED = Path(__file__).parents[3] / "shared" / "published"


@pytest.mark.exhaustive
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
@pytest.mark.parametrize("model", ["llava-v1.6-mistral-7b-8bit", "pixtral-12b-8bit"])
def test_what_is_kept_at_the_end_is_what_published_runs_kept(model: str) -> None:
    found = [abs(error) for _, error in errors(PUBLISHED, model)]
    assert len(found) >= 8
    assert median(found) <= 0.001
    assert max(found) <= 0.02
