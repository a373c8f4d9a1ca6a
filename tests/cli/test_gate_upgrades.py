"""Typical upgrades, on checkpoints of real size with the tensors of mlx-lm's own classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import target, write_policy, write_quantised
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, sample_config

pytest.importorskip("mlx_lm")

NO_GROWTH = {"weights": "0%", "kv_per_token": "0%", "peak": "0%"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def between(
    memfit: Memfit, folder: Path, limits: Mapping[str, Any], **keys: Any
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the exit code of `memfit gate old new`, the checks and the changes by name."""
    policy = write_policy(folder, it=target(limits, **keys))
    run = memfit("gate", "old", "new", "--policy", policy, "--format", "json")
    (report,) = run.json["targets"]
    checks = {check["limit"]: check for check in report["checks"]}
    return run.code, checks, {change["figure"]: change for change in report["changes"]}


def test_a_larger_dense_model_exceeds_growth_with_a_remedy(memfit: Memfit, folder: Path) -> None:
    write_quantised(folder / "old", QWEN3_4B)
    write_quantised(folder / "new", sample_config("qwen3-8b-4bit"))
    limits = {"peak": "90%", "growth": {"weights": "50%", "kv_per_token": "0%", "peak": "60%"}}
    code, checks, changes = between(memfit, folder, limits)
    assert code == 1
    # Measured (tests/models.py); the expected bytes of sample_configs/qwen3-8b-4bit.yaml.
    assert changes["weights_bytes"]["before"] == 2_262_535_712
    assert changes["weights_bytes"]["now"] == 4_607_731_712
    assert checks["growth.weights"]["allowed"] == 2_262_535_712 * 150 // 100
    assert [name for name, check in checks.items() if not check["passed"]] == [
        "growth.weights",
        "growth.peak",
    ]
    (remedy,) = checks["growth.weights"]["remedies"]
    assert remedy["setting"] == "quantize"
    write_quantised(folder / "new", sample_config("qwen3-8b-4bit"), bits=remedy["value"])
    assert between(memfit, folder, limits)[1]["growth.weights"]["passed"]


def test_eight_to_four_bits_passes_without_any_growth(memfit: Memfit, folder: Path) -> None:
    write_quantised(folder / "old", QWEN3_4B, bits=8)
    write_quantised(folder / "new", QWEN3_4B, bits=4)
    code, _, changes = between(memfit, folder, {"growth": NO_GROWTH})
    assert code == 0
    # Half a byte for each of 4,021,784,576 parameters, except those not quantised.
    assert changes["weights_bytes"]["by"] == -(4_021_588_480 // 2)


def test_an_upgrade_from_four_to_eight_bits_has_the_remedy_four_bits(
    memfit: Memfit, folder: Path
) -> None:
    write_quantised(folder / "old", QWEN3_4B, bits=4)
    write_quantised(folder / "new", QWEN3_4B, bits=8)
    code, checks, _ = between(memfit, folder, {"growth": {"weights": "1%"}})
    assert code == 1
    assert checks["growth.weights"]["remedies"] == [{"setting": "quantize", "value": 4}]


def test_a_longer_vocabulary_under_the_same_name_is_reported(memfit: Memfit, folder: Path) -> None:
    write_quantised(folder / "model", QWEN3_4B)
    write_policy(folder, it=target({"growth": {"weights": "1%"}}))
    assert memfit("gate", "--update").code == 0
    write_quantised(folder / "model", {**QWEN3_4B, "vocab_size": 151936})
    run = memfit("gate", "--format", "json")
    (report,) = run.json["targets"]
    assert (run.code, report["checks"][0]["passed"]) == (0, True)
    # 267 rows of 2560 elements, 4.5 bits each.
    assert report["changes"][0]["by"] == 267 * 2560 * 9 // 16
    (note,) = report["notes"]
    assert note["code"] == "checkpoint-changed"
    assert "config.json" in note["message"]
    assert "model-00001-of-00002.safetensors" in note["message"]


def test_a_change_from_full_to_sliding_attention_needs_less_cache(
    memfit: Memfit, folder: Path
) -> None:
    llama = sample_config("llama-3.1-8b")
    kinds = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)]
    write_quantised(folder / "old", llama)
    write_quantised(folder / "new", {**llama, "layer_types": kinds, "sliding_window": 1024})
    work = {"prompt_tokens": 32768, "max_tokens": 256}
    limits = {"growth": NO_GROWTH}
    code, _, changes = between(memfit, folder, limits, workload=work, device="m4-max-64")
    assert code == 0
    assert changes["weights_bytes"]["by"] == 0
    assert changes["peak_bytes"]["by"] < -(2**30)


def test_more_experts_exceed_the_capacity_limit_in_percent(memfit: Memfit, folder: Path) -> None:
    experts = sample_config("qwen3-30b-a3b-4bit")
    write_quantised(folder / "old", experts)
    write_quantised(folder / "new", {**experts, "num_experts": 256})
    limits = {"expert_capacity": "100%", "growth": {"kv_per_token": 0}}
    code, checks, changes = between(memfit, folder, limits, memory="32GB")
    assert code == 1
    assert (changes["expert_capacity"]["before"], checks["expert_capacity"]["allowed"]) == (
        128,
        256,
    )
    assert 128 < changes["expert_capacity"]["now"] < 256
    assert checks["growth.kv_per_token"]["passed"]
