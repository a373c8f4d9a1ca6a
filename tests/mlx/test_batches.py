"""Batches, compared with mlx-lm's own batch generator."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the generator is mlx-lm's")
from mlx_lm.generate import BatchGenerator

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.sizing.sized_model import Method, size
from tests.oracle import Oracle

TESTS = Path(__file__).parents[1]
(BIGCODE,) = (
    config
    for config in json.loads((TESTS / "trace" / "cases.json").read_text())
    if config["model_type"] == "gpt_bigcode"
)


def case(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TESTS / "arch" / "cases" / f"{name}.json").read_text())
    return config


def generates(config: dict[str, Any], sequences: int) -> bool:
    generator = BatchGenerator(
        Oracle(config, "F32").model, completion_batch_size=4, prefill_batch_size=4
    )
    try:
        generator.insert([[1, 2, 3, 4, 5]] * sequences, max_tokens=[2] * sequences)
        return any(generator.next()[1] for _ in range(4))
    except ValueError:
        return False
    finally:
        generator.close()


@pytest.mark.parametrize("sequences", [2, 3])
@pytest.mark.parametrize(
    ("config", "methods"),
    [
        (case("llama"), ("formula", "trace")),
        # Two heads of keys: a mask of two sequences is added, to the wrong scores.
        (case("gemma2"), ("formula", "trace")),
        (case("llama4"), ("formula", "trace")),
        (BIGCODE, ("trace",)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_batch_that_mlx_lm_does_not_run_is_rejected_or_noted(
    config: dict[str, Any], methods: tuple[Method, ...], sequences: int
) -> None:
    workload, found = Workload(prompt_tokens=40, batch=sequences), []
    for method in methods:
        checkpoint = Checkpoint(id="m", source="config", config=config, config_name="config.json")
        sized = size(checkpoint, device=None, method=method)
        try:
            figures = sized.figures_for(workload)
        except UnsupportedError as error:
            found.append("mlx-lm's class fails on a batch" not in str(error))
        else:
            notes = sized.runtime_model.notes(workload, figures, Units.GB)
            found.append("no-batch" not in [note.code for note in notes])
    assert found == [generates(config, sequences)] * len(methods)
