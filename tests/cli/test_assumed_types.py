"""What is proposed for a model type that nothing describes, and what an assumed type prints."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

KINDS = ("qwen3_mtp", "qwen3_assistant", "qwen3_eagle3", "qwen3_dflash", "bert", "qwen3_tts")


@pytest.mark.parametrize("kind", KINDS)
def test_no_family_is_proposed_for_what_generates_no_text(
    kind: str, tmp_path: Path, memfit: Memfit
) -> None:
    path = write_config(tmp_path, {**QWEN3_4B, "model_type": kind, "architectures": ["Other"]})
    run = memfit("estimate", path, "--memory", "32GB")
    assert (run.code, run.out) == (3, "")
    assert "--as" not in run.err
    assert "nearest known" not in run.err


def test_an_assumed_type_prints_no_command(tmp_path: Path, memfit: Memfit) -> None:
    path = write_config(tmp_path, {**QWEN3_4B, "model_type": "qwen4", "architectures": ["Other"]})
    run = memfit("estimate", path, "--as", "qwen3", "--memory", "32GB", "--json")
    assert run.code == 0
    assert run.json["actions"]
    assert not any(action["commands"] for action in run.json["actions"])
    assert "mlx_lm." not in memfit("estimate", path, "--as", "qwen3", "--memory", "32GB").out
