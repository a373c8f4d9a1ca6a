"""`--method`: the formulas, mlx-lm's own class run lazily, and which of them is used."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B, QWEN3_4B_4BIT, quantised_tensors, write_checkpoint, write_config

CASES = Path(__file__).parents[1] / "arch" / "cases"
# A class that mlx-lm has and the formulas do not,
# in the small shape of mlx-lm's own tests (tests/test_models.py, nanochat).
UNDESCRIBED = {
    "model_type": "nanochat",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def _mlx_lm() -> None:
    pytest.importorskip("mlx_lm")


def test_the_trace_of_a_checkpoint_has_the_bytes_of_its_headers(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, QWEN3_4B_4BIT, quantised_tensors(QWEN3_4B, 4))
    arguments = ("estimate", path, "--prompt-tokens", "2048", "--max-tokens", "128", "--json")
    by_trace = memfit(*arguments, "--method", "trace").json
    by_formula = memfit(*arguments, "--method", "formula").json
    assert (by_trace["method"], by_formula["method"]) == ("trace", "formula")
    assert by_trace["components"]["weights"] == by_formula["components"]["weights"]
    traced, derived = by_trace["components"]["kv"], by_formula["components"]["kv"]
    assert (traced.pop("basis"), derived.pop("basis")) == ("traced", "exact")
    assert traced == derived
    assert not [note for note in by_trace["notes"] if note["code"] == "methods-differ"]
    assert any("mlx-lm" in text for text in by_trace["assumptions"])
    # Two models of the same scheduler: they may differ by the errors in docs/accuracy.md.
    assert by_trace["peak_bytes"] == pytest.approx(by_formula["peak_bytes"], rel=0.05)


def test_a_model_that_only_mlx_lm_knows_is_recorded(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, UNDESCRIBED)
    assert memfit("estimate", path, "--method", "formula").code == 3
    data = memfit("estimate", path, "--memory", "16GB", "--context", "300", "--json").json
    # 4 layers x 2 heads x 2 x 32 x 2 bytes, in two steps of 256 tokens.
    assert data["components"]["kv"]["bytes_per_token"] == 4 * 2 * 2 * 32 * 2
    assert data["components"]["kv"]["bytes"] == 4 * 2 * 2 * 32 * 2 * 512
    assert data["method"] == "recorded"
    assert data["verdict"] == "fits"


def test_a_value_the_class_rejects_gives_the_error_of_the_class(
    memfit: Memfit, tmp_path: Path
) -> None:
    config = {key: value for key, value in UNDESCRIBED.items() if key != "hidden_size"}
    run = memfit("estimate", write_config(tmp_path, {**config, "hidden_size": "wide"}))
    assert run.code in (2, 3)
    assert run.err.count("\n") <= 4
    assert "nanochat" in run.err


def test_code_from_a_model_repository_never_runs(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, {**UNDESCRIBED, "model_file": "model.py"})
    (tmp_path / "model.py").write_text("raise SystemExit('this ran')")
    run = memfit("estimate", path)
    assert run.code == 3
    assert "this ran" not in run.err
    assert json.dumps("model_file").strip('"') in run.err


def test_explain_lists_the_arrays_alive_at_the_peak(memfit: Memfit, tmp_path: Path) -> None:
    run = memfit("estimate", write_config(tmp_path, QWEN3_4B), "--method", "trace", "--explain")
    assert "alive then: weights" in run.out


def test_a_traced_run_is_plotted_call_by_call(memfit: Memfit, tmp_path: Path) -> None:
    config = write_config(tmp_path, {**QWEN3_4B, "num_hidden_layers": 3})
    arguments = ("estimate", config, "--method", "trace", "--plot", "--prompt-tokens", "3000")
    data = memfit(*arguments, "--max-tokens", "4", "--json").json
    phases = [call["phase"] for call in data["run"]]
    assert phases == ["first_chunk", "last_chunk", "last_token", "decode"]
    assert max(max(call["bytes"]) for call in data["run"]) == data["peak_bytes"]
    out = memfit(*arguments, "--memory", "16GB").out
    assert "peak" in next(line for line in out.splitlines() if "operations of a run" in line)
    assert "last chunk" in out
    assert out.index("operations of a run") < out.index("Memory against context")
    assert "run" not in memfit("estimate", config, "--method", "formula", "--plot", "--json").json


@pytest.mark.exhaustive(daily=True)
def test_the_trace_chooses_the_prefill_step(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, {**UNDESCRIBED, "vocab_size": 50_000, "hidden_size": 512})
    arguments = ("estimate", path, "--prompt-tokens", "9000", "--json", "--margin", "0")

    def with_step(step: int, working_set: int) -> Any:
        steps = ("--prefill-step", str(step), "--working-set", f"{working_set}B")
        return memfit(*arguments, *steps).json

    steps = (2048, 1024, 512, 256, 128)
    needs = [with_step(step, 10**11)["peak_bytes"] for step in steps]
    working_set = (needs[0] + min(needs)) // 2 * 10 // 9
    largest = next(step for step, need in zip(steps, needs, strict=True) if need < needs[0])
    assert working_set * 9 // 10 >= needs[steps.index(largest)]
    recommended = with_step(2048, working_set)["recommendation"]
    assert recommended["prefill_step"]["value"] == largest
    assert "is the largest that fits" in recommended["prefill_step"]["reason"]


def test_an_unknown_model_in_an_unknown_format_gives_a_bound(
    memfit: Memfit, tmp_path: Path
) -> None:
    plain = memfit("estimate", write_config(tmp_path / "plain", UNDESCRIBED), "--json").json
    packed = {**UNDESCRIBED, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    answer = memfit("estimate", write_config(tmp_path / "packed", packed), "--json").json
    weights = answer["components"]["weights"]
    assert weights["basis"] == "bound"
    assert weights["loaded_bytes"] == plain["components"]["weights"]["loaded_bytes"]
    assert [note["code"] for note in answer["notes"]].count("dequantised") == 1


# A router that convert gives other bits is one of the block's own in a config without an entry.
def test_the_trace_of_a_quantised_config_has_the_bytes_of_the_block(
    memfit: Memfit, tmp_path: Path
) -> None:
    config = json.loads((CASES / "qwen3_moe.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    path = write_config(tmp_path, config)
    answer = memfit("estimate", path, "--method", "trace", "--json").json
    weights = answer["components"]["weights"]
    assert weights["bytes"] == weights["loaded_bytes"]
    assert not [note for note in answer["notes"] if note["code"] == "methods-differ"]


def test_a_draft_model_is_traced_where_its_target_is(memfit: Memfit, tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", UNDESCRIBED)
    described = {**json.loads((CASES / "qwen3.json").read_text()), "vocab_size": 320}
    draft = write_config(tmp_path / "draft", described)
    prompt = ("--prompt-tokens", "300", "--max-tokens", "20", "--memory", "16GB", "--json")
    data = memfit("estimate", target, "--draft", draft, *prompt).json
    alone = memfit("estimate", draft, *prompt).json["components"]
    added = data["components"]["draft"]
    assert added["basis"] == "traced"
    assert added["bytes"] >= alone["weights"]["bytes"] + alone["kv"]["bytes"]


def test_a_format_in_the_name_of_a_class_without_a_family_is_said(
    memfit: Memfit, tmp_path: Path
) -> None:
    folder = tmp_path / "Nano-NVFP4"
    folder.mkdir()
    data = memfit("estimate", write_config(folder, UNDESCRIBED), "--json").json
    assert data["components"]["weights"]["basis"] == "bound"
    assert "undeclared-format" in [note["code"] for note in data["notes"]]
