"""`memfit tune --image`: errors before anything is loaded."""

import importlib.util
from pathlib import Path

import pytest

from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit

pytest.importorskip("mlx_lm", reason="tune needs it")


@pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is not None, reason="it is installed")
def test_an_image_without_mlx_vlm_gives_a_one_line_error(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    about = ("--prompt", "What is it?", "--image", tmp_path / "red.png")
    run = memfit("tune", checkpoints("dense"), *about)
    assert run.code == 5
    assert run.err == ("memfit: an image needs mlx_vlm, not installed here: install memfit[vlm]\n")
    assert run.out == ""


def test_an_image_needs_a_text(memfit: Memfit, checkpoints: Checkpoints) -> None:
    run = memfit("tune", checkpoints("dense"), "--prompt-tokens", "5", "--image", "red.png")
    assert run.code == 2
    assert "give --prompt" in run.err
