"""Experts under mlx-moe, the runtime that keeps some of them, in the gate and in estimates."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import target, write_policy
from tests.cli.running import Memfit

MODEL = "qwen3-next-80b-a3b-4bit"
MACHINE = ("--memory", "32GB", "--context", "4k")
MOE = ("--runtime", "mlx-moe")


@pytest.mark.parametrize(("least", "code"), [(208, 0), (216, 1)])
def test_the_gate_compares_the_experts_that_mlx_moe_keeps(
    least: int, code: int, tmp_path: Path, memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits: dict[str, Any] = {"expert_capacity": least, "load_peak": "90%"}
    write_policy(tmp_path, it=target(limits, model=MODEL, memory="32GB", runtime="mlx-moe"))
    run = memfit("gate", "--format", "json")
    checks = run.json["targets"][0]["checks"]
    figure = {check["limit"]: check["figure"] for check in checks}["expert_capacity"]
    assert (run.code, figure) == (code, 208)


def test_an_estimate_is_of_the_experts_that_are_named(memfit: Memfit) -> None:
    def resident(*options: str) -> int:
        answer = memfit("estimate", MODEL, *MACHINE, *MOE, *options, "--json").json
        nbytes: int = answer["components"]["weights"]["resident_bytes"]
        return nbytes

    # 43,486,543,872 bytes of experts in 512 slots a layer (`expert_capacity`).
    slot = 43_486_543_872 // 512
    assert resident() - resident("--capacity", "160") == (208 - 160) * slot


def test_a_comparison_of_runtimes_keeps_them_under_mlx_moe_alone(memfit: Memfit) -> None:
    names = ("--runtimes", "mlx-lm,mlx-moe", "--capacity", "160")
    answer = memfit("compare", MODEL, *names, *MACHINE, "--json").json
    verdicts = {each["label"]: each["verdict"] for each in answer["models"]}
    assert verdicts == {"mlx-lm": "exceeds", "mlx-moe": "fits"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "mlx-lm has no such setting; give --runtime mlx-moe"),
        (("--runtime", "mlx-vlm"), "mlx-vlm has no such setting; give --runtime mlx-moe"),
        (MOE, "routes a token to 10 of 512 experts"),
    ],
)
def test_experts_that_cannot_be_kept_are_bad_input(
    options: tuple[str, ...], said: str, memfit: Memfit
) -> None:
    run = memfit("estimate", MODEL, *MACHINE, *options, "--capacity", "5")
    assert (run.code, run.out) == (2, "")
    assert said in run.err


def test_what_to_set_under_mlx_moe_are_the_experts_that_it_keeps(memfit: Memfit) -> None:
    answer = memfit("estimate", MODEL, *MACHINE, *MOE, "--json").json["recommended"]
    assert (answer["expert_capacity"], answer["experts"]) == (208, 512)
    assert "208 of 512 experts" in memfit("estimate", MODEL, *MACHINE, *MOE).out
    whole = memfit("estimate", MODEL, "--memory", "64GB", "--context", "4k", "--json").json
    assert whole["recommended"]["expert_capacity"] == 512
    assert "experts" not in whole["recommended"]
