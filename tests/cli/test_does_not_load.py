"""Checkpoints that mlx-lm refuses to load: a verdict of their own, in every command and format."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import target, write_policy, write_quantised
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, plain_tensors, write_checkpoint

REASON = "mtp.fc.weight: in a header and not in the model class"
MACHINE = ("--memory", "32GB", "--context", "4k")


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """A text model with a tensor that its class has no place for."""
    tensors = {**plain_tensors(QWEN3_4B), "mtp.fc.weight": ("BF16", (2560, 5120))}
    return write_checkpoint(tmp_path / "refused", QWEN3_4B, tensors)


@pytest.mark.parametrize("extra", [(), ("--quantize", "4"), ("--ranks", "2")])
@pytest.mark.parametrize("machine", [MACHINE, ("--context", "4k")])
def test_an_estimate_says_that_it_does_not_load_and_prints_no_command(
    machine: tuple[str, ...], extra: tuple[str, ...], refused: Path, memfit: Memfit
) -> None:
    for form in ("table", "markdown", "html", "csv", "yaml"):
        run = memfit("estimate", refused, *machine, *extra, "--format", form)
        assert (form, run.code) == (form, 3)
        assert "mlx_lm." not in run.out
        assert "Nothing to change" not in run.out
        if form in ("table", "markdown", "html"):
            assert "mlx-lm does not load it" in run.out
            assert "mtp.fc.weight" in run.out
    run = memfit("estimate", refused, *machine, *extra, "--json")
    answer = run.json
    assert (run.code, answer["verdict"], answer["actions"]) == (3, "does_not_load", [])
    assert answer["refusal"] == {"reason": REASON, "loaded_by": []}
    assert answer["grid"]["rows"] == []
    assert {
        each["state"] for name, each in answer["recommendation"].items() if name != "basis"
    } == {"not_applicable"}


def test_its_weights_are_exact(refused: Path, memfit: Memfit) -> None:
    weights = memfit("estimate", refused, *MACHINE, "--json").json["components"]["weights"]
    (file,) = refused.glob("model*.safetensors")
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    size = file.stat().st_size - header - 8
    assert (weights["bytes"], weights["basis"]) == (size, "exact")


def test_a_comparison_marks_it_and_ends_with_3(refused: Path, memfit: Memfit) -> None:
    run = memfit("compare", refused, "qwen3-0.6b", *MACHINE, "--matrix", "batch=1,2", "--json")
    verdicts = [cell["verdict"] for cell in run.json["matrix"]["cells"]]
    assert (run.code, run.json["models"][0]["verdict"]) == (3, "does_not_load")
    assert verdicts == ["does_not_load", "fits"] * 2
    assert "does not load" in memfit("compare", refused, "qwen3-0.6b", *MACHINE).out


@pytest.mark.exhaustive
def test_a_list_of_what_fits_leaves_it_out_with_the_reason(refused: Path, memfit: Memfit) -> None:
    answer = memfit("fits", refused.parent, "--memory", "32GB", "--json").json
    found = [each for each in answer["not_sized"] if each["name"] == "refused"]
    assert [each["why"]["slug"] for each in found] == ["does-not-load"]
    assert "refused" not in [row["name"] for row in answer["models"]]


@pytest.mark.parametrize("keys", [{}, {"basis": "bound"}, {"quantize": 4}])
def test_no_policy_accepts_it(
    keys: dict[str, Any], refused: Path, memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(refused.parent)
    limits = {"peak": "90%", **{key: keys[key] for key in keys if key == "basis"}}
    settings = {key: keys[key] for key in keys if key != "basis"}
    write_policy(refused.parent, it=target(limits, path="refused", **settings))
    run = memfit("gate", "--allow-bounds", "--format", "json")
    report = run.json["targets"][0]
    assert (run.code, report["status"]) == (3, "undecided")
    assert REASON in report["message"]


@pytest.mark.parametrize(
    "plan", [("context",), ("server", "--context", "4k"), ("static",), ("ranks",)], ids="-".join
)
def test_no_plan_is_made_for_it(plan: tuple[str, ...], refused: Path, memfit: Memfit) -> None:
    machine = () if plan == ("static",) else ("--memory", "32GB")
    run = memfit("plan", plan[0], refused, *plan[1:], *machine)
    assert (run.code, run.out) == (3, "")
    assert "mlx-lm does not load it" in run.err


def test_a_draft_model_that_does_not_load_is_named(refused: Path, memfit: Memfit) -> None:
    answer = memfit("estimate", "qwen3-14b-4bit", "--draft", refused, *MACHINE, "--json").json
    assert answer["verdict"] == "does_not_load"
    assert answer["refusal"]["reason"].startswith(f"the draft model {refused}: mtp.fc.weight")


def test_files_that_another_runtime_loads_are_sized_for_it(tmp_path: Path, memfit: Memfit) -> None:
    config = {**QWEN3_4B, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = memfit("estimate", tmp_path, *MACHINE, "--json").json
    assert answer["verdict"] == "does_not_load"
    assert answer["refusal"]["loaded_by"] == ["vllm"]


def test_bits_that_only_the_files_show_load(tmp_path: Path, memfit: Memfit) -> None:
    # As JANG and oQ mix them: mlx-lm infers the bits of each matrix from its shape.
    pytest.importorskip("mlx_lm", reason="the tensors are mlx-lm's")
    path = write_quantised(tmp_path / "mixed", QWEN3_4B, bits=8)
    config = json.loads((path / "config.json").read_text())
    config["quantization"]["bits"] = 4
    (path / "config.json").write_text(json.dumps(config))
    answer = memfit("estimate", path, *MACHINE, "--json").json
    weights = answer["components"]["weights"]
    assert (answer["verdict"], weights["basis"]) == ("fits", "exact")
