"""A fingerprint changes with every part of a model that its size depends on."""

import json
from pathlib import Path

import pytest

from memfit.estimators.checkpoint.manifest import fingerprint_of
from memfit.estimators.checkpoint.opening import open_checkpoint
from tests.models import QWEN3_4B, write_checkpoint
from tests.sparse import Shapes

TENSORS: Shapes = {f"model.layers.{n}.mlp.up_proj.weight": ("BF16", (64, 32)) for n in range(4)}


def fingerprint(directory: Path) -> str:
    return fingerprint_of(open_checkpoint(str(directory)))


@pytest.fixture
def original(tmp_path: Path) -> str:
    return fingerprint(write_checkpoint(tmp_path / "model", QWEN3_4B, TENSORS, shards=2))


def test_path_and_spacing_do_not_change_the_fingerprint(tmp_path: Path, original: str) -> None:
    moved = write_checkpoint(tmp_path / "elsewhere", QWEN3_4B, TENSORS, shards=2)
    backwards = dict(reversed(QWEN3_4B.items()))
    (moved / "config.json").write_text(json.dumps(backwards, indent=7))
    assert fingerprint(moved) == original


@pytest.mark.parametrize(
    ("change", "tensors", "shards"),
    [
        ({"rope_theta": 10000}, TENSORS, 2),
        ({}, TENSORS, 1),
        ({}, {**TENSORS, "lm_head.weight": ("BF16", (64, 32))}, 2),
        ({}, {name: ("F16", shape) for name, (_, shape) in TENSORS.items()}, 2),
    ],
    ids=["config", "shards", "tensor", "type"],
)
def test_config_shards_and_tensors_change_the_fingerprint(
    tmp_path: Path, original: str, change: dict[str, int], tensors: Shapes, shards: int
) -> None:
    other = write_checkpoint(tmp_path / "other", {**QWEN3_4B, **change}, tensors, shards=shards)
    assert fingerprint(other) != original
