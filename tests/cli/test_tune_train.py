"""``memfit tune train``: the real trainer through the whole command, and every error."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

pytest.importorskip("mlx_lm", reason="the models that are trained are mlx-lm's")
SHORT = ("--num-layers", "-1", "--batch-size", "2", "--max-seq-length", "65", "--timeout", "120")


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), ("--grad-checkpoint", "--grad-accumulation-steps", "2")])
def test_the_largest_step_is_near_the_estimate(
    options: tuple[str, ...], memfit: Memfit, checkpoints: Checkpoints
) -> None:
    ran = memfit("tune", "train", checkpoints("dense"), *SHORT, *options, "--json")
    assert ran.code == 0, ran.err
    phases = {each["phase"]: each for each in ran.json["phases"]}
    assert phases["later_steps"]["ratio"] == pytest.approx(1, abs=0.05)
    # It is never the largest moment; checkpointed, docs/accuracy.md says how low it is.
    assert phases["validation"]["ratio"] == pytest.approx(1, abs=0.12)
    assert ran.json["steps"] == 3 * (2 if options else 1)
    if not options:
        _is_kept_and_used(memfit, checkpoints("dense"), ran.json)


def _is_kept_and_used(memfit: Memfit, model: Path, tuned: dict[str, Any]) -> None:
    """The measurement decides the plan of the same recipe, and of no other."""
    asked = ("plan", "train", model, *SHORT[:-2], "--device", "host", "--json")
    peaks = {each["phase"]: each["measured_bytes"] for each in tuned["phases"]}
    plan = memfit(*asked).json
    assert plan["measured"] == {
        "measurement_id": tuned["measurement_id"],
        **{f"{phase}_bytes": nbytes for phase, nbytes in peaks.items()},
    }
    assert (plan["basis"], plan["needed_bytes"]) == (
        "measured",
        max(peaks.values()) + plan["margin_bytes"],
    )
    other = memfit(*asked, "--rank", "4").json
    assert (other["measured"], other["basis"]) == (None, "traced")
    estimate = memfit("estimate", model, "--device", "host", "--context", "64", "--json").json
    assert estimate["components"]["workspace"]["basis"] != "measured"
    shown = memfit("measurements", "show", tuned["measurement_id"]).out
    assert "Later steps" in shown
    assert "lora of all layers, batch 2, 65 tokens" in shown


def test_what_cannot_run_is_one_line(memfit: Memfit, checkpoints: Checkpoints) -> None:
    path: Path = checkpoints("dense")
    asked = ("tune", "train", path, *SHORT)
    assert_one_line(memfit(*asked, "--memory-limit", "1MB"), 5, "above the memory limit", "--force")
    layers = ("tune", "train", path, *SHORT[2:], "--num-layers", "99")
    assert_one_line(memfit(*layers), 3, "num_layers 99")
    assert_one_line(memfit("tune", "train", "nowhere", *SHORT), 2, "nowhere")
