"""The gate names the smaller workload that decides, and its remedies hold for all smaller ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import target, write_policy
from tests.cli.running import Memfit


def policy(directory: Path, limits: dict[str, Any], **workload: Any) -> None:
    asked = {"prompt_tokens": 23518, "kv_bits": 4, "batch": 3, **workload}
    write_policy(directory, chat=target(limits, model="sample:qwen3-vl-4b", workload=asked))


@pytest.mark.parametrize(
    ("device", "runtime"),
    [("rtx-4090", "mlx-lm"), ("rtx-4090", "vllm"), ("m4-pro-24", "llama.cpp")],
)
def test_a_bound_that_only_grows_is_of_the_workload_itself(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, runtime: str
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"model": "sample:qwen3-0.6b", "device": device, "runtime": runtime}
    chosen = target({"peak": "100%"}, **named)
    write_policy(tmp_path, chat=chosen)
    report = memfit("gate", "--allow-bounds", "--format", "json").json["targets"][0]
    assert "peak_of" not in report["figures"]


@pytest.mark.exhaustive
def test_a_broken_limit_names_the_workload_that_breaks_it(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Above the peak of the workload itself, below that of a smaller one.
    policy(tmp_path, {"peak": "21GB", "wired_limit": "22GB", "load_peak": "10GB"})
    run = memfit("gate", "--format", "json")
    report = run.json["targets"][0]
    peak, load, wired = (
        next(check for check in report["checks"] if check["limit"] == name)
        for name in ("peak", "load_peak", "wired_limit")
    )
    assert (run.code, peak["passed"], load["passed"], wired["passed"]) == (1, False, True, False)
    assert peak["peak_of"] == wired["peak_of"] == report["figures"]["peak_of"]
    assert "peak_of" not in load
    of = peak["peak_of"]
    at = f"at batch {of['batch']}, {of['prompt_tokens']} tokens"
    screen = " ".join(memfit("gate").out.split())
    assert f"the peak is {at}" in screen
    assert f"GB {at}, allowed at most 21.000 GB" in screen


@pytest.mark.exhaustive(daily=True)
def test_each_remedy_passes_with_its_smaller_workloads(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy(tmp_path, {"peak": "18GB"})
    (check,) = memfit("gate", "--format", "json").json["targets"][0]["checks"]
    remedies = {remedy["setting"]: remedy["value"] for remedy in check["remedies"]}
    assert {"context", "prefill_step"} <= remedies.keys()
    for change in (
        {"prompt_tokens": remedies["context"]},
        {"prefill_step": remedies["prefill_step"]},
    ):
        policy(tmp_path, {"peak": "18GB"}, **change)
        assert memfit("gate").code == 0, change


def test_a_baseline_without_the_workload_of_its_peak_is_read(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy(tmp_path, {"growth": {"peak": "0%"}})
    assert memfit("gate", "--update").code == 0
    assert memfit("gate").code == 0
    lock = tmp_path / "memfit.lock.json"
    document = json.loads(lock.read_text())
    figures = document["targets"]["chat"]["figures"]
    assert figures.pop("peak_of") == {"batch": 3, "prompt_tokens": figures_tokens(memfit)}
    lock.write_text(json.dumps(document))
    assert memfit("gate").code == 0


def figures_tokens(memfit: Memfit) -> int:
    report = memfit("gate", "--format", "json").json["targets"][0]
    tokens: int = report["figures"]["peak_of"]["prompt_tokens"]
    return tokens
