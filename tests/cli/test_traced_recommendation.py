"""Recommendations by trace agree with the trace; those by formula are marked."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.trace import kernel_stubs
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

CASES = Path(__file__).parents[1] / "arch" / "cases"
MAMBA, QWEN3_5 = (json.loads((CASES / f"{n}.json").read_text()) for n in ("mamba", "qwen3_5"))
SMALL = {**QWEN3_4B, "num_hidden_layers": 3, "vocab_size": 4096}


@pytest.fixture(autouse=True)
def _mlx_lm() -> None:
    pytest.importorskip("mlx_lm")


def reasons(data: Any) -> dict[str, str]:
    recommendation = data["recommendation"]
    return {name: recommendation[name]["reason"] for name in recommendation if name != "basis"}


def test_the_recommended_context_and_wired_limit_are_correct_by_trace(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = write_config(tmp_path, SMALL)
    arguments = ("estimate", path, "--method", "trace", "--max-tokens", "0", "--json")
    machine = ("--working-set", "1GB", "--prompt-tokens")
    recommended = memfit(*arguments, *machine, "1k").json["recommendation"]
    tokens = recommended["context_tokens"]["value"]
    there = memfit(*arguments, *machine, str(tokens)).json
    need = there["peak_bytes"] + there["components"]["margin"]["bytes"]
    assert there["verdict"] == "fits"
    assert tokens < QWEN3_4B["max_position_embeddings"]
    assert recommended["wired_limit_bytes"]["value"] == need


def test_recommended_kv_bits_fit_by_trace(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, SMALL)
    arguments = ("estimate", path, "--context", "4k", "--margin", "0", "--json", "--working-set")
    needs = [
        memfit(*arguments, "1TB", "--method", method).json["peak_bytes"]
        for method in ("formula", "trace")
    ]
    between = f"{sum(needs) // 2 * 10 // 9}B"
    data = memfit(*arguments, between, "--method", "trace").json
    keeps = all(data["recommendation"][n]["state"] == "keep" for n in ("kv_bits", "prefill_step"))
    assert keeps == (data["verdict"] == "fits")


def test_with_ample_memory_the_formula_is_used_with_its_error(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = write_config(tmp_path, SMALL)
    arguments = ("estimate", path, "--method", "trace", "--memory", "64GB", "--json")
    data = memfit(*arguments, "--context", "4k").json
    tokens = data["recommendation"]["context_tokens"]["value"]
    assert tokens == QWEN3_4B["max_position_embeddings"]
    assert "by formula" in reasons(data)["context_tokens"]
    assert "by formula" in reasons(data)["wired_limit_bytes"]
    there = memfit(*arguments, "--prompt-tokens", str(tokens), "--max-tokens", "0").json
    need = there["peak_bytes"] + there["components"]["margin"]["bytes"]
    assert data["recommendation"]["wired_limit_bytes"]["value"] >= need


def test_the_curve_of_a_traced_estimate_states_that_it_uses_the_formula(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = write_config(tmp_path, SMALL)
    arguments = ("estimate", path, "--memory", "16GB", "--context", "300", "--plot", "--method")
    assert "Memory against context, by formula:" in memfit(*arguments, "trace").out
    assert "Memory against context:" in memfit(*arguments, "formula").out
    assert memfit(*arguments, "trace", "--json").json["curve_method"] == "formula"
    assert "curve_method" not in memfit(*arguments, "formula", "--json").json


@pytest.mark.exhaustive
def test_a_loop_too_long_to_trace_still_gives_traced_weights_and_states(
    memfit: Memfit, tmp_path: Path
) -> None:
    config = {**MAMBA, "num_hidden_layers": 64}
    path = write_config(tmp_path, config)
    arguments = ("estimate", path, "--context", "4k", "--memory", "16GB", "--plot", "--json")
    by_trace = memfit(*arguments, "--method", "trace").json
    by_formula = memfit(*arguments, "--method", "formula").json
    assert by_trace["method"] == "trace"
    traced, derived = by_trace["components"], by_formula["components"]
    assert traced["ssm"] == {**derived["ssm"], "basis": "traced"}
    assert traced["ssm"]["bytes"] > 0
    assert traced["workspace"] == derived["workspace"]
    assert traced["workspace"]["basis"] == "derived"
    notes = {note["code"]: note["message"] for note in by_trace["notes"]}
    assert notes["not-traced"].startswith(f"{path}")
    assert "mamba" in notes["not-traced"]
    assert "run" not in by_trace
    assert "by formula" in reasons(by_trace)["context_tokens"]


def test_a_graph_that_mlx_cannot_export_still_gives_traced_weights_and_caches(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a newer MLX had made contiguous copies a primitive that this memfit does not know.
    monkeypatch.delitem(kernel_stubs._NOT_EXPORTED, "contiguous")
    path = write_config(tmp_path, QWEN3_5)
    arguments = ("estimate", path, "--context", "1k", "--memory", "16GB", "--json", "--method")
    by_trace, by_formula = (memfit(*arguments, method).json for method in ("trace", "formula"))
    traced, derived = by_trace["components"], by_formula["components"]
    assert traced["kv"] == {**derived["kv"], "basis": "traced"}
    assert traced["workspace"] == derived["workspace"]
    notes = {note["code"]: note["message"] for note in by_trace["notes"]}
    assert "does not export its operation Contiguous: weights" in notes["not-traced"]


@pytest.mark.parametrize(("device", "percent"), [("m4-max-64", 10), ("rtx-4090", 0)])
def test_a_workspace_on_cuda_is_a_bound(
    memfit: Memfit, tmp_path: Path, device: str, percent: int
) -> None:
    path = write_config(tmp_path, SMALL)
    arguments = ("estimate", path, "--device", device, "--method", "trace")
    data = memfit(*arguments, "--json").json
    assert data["components"]["workspace"]["error_percent"] == percent
    codes = [note["code"] for note in data["notes"]]
    assert ("cuda-bound" in codes) == (percent == 0)
    assert (data["components"]["workspace"]["basis"] == "bound") == (percent == 0)
    assert ("±" in memfit(*arguments, "-v").out) == (percent > 0)
