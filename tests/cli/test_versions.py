"""`--mlx-version` and `--mlx-lm-version`, and the keys of a policy."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.probes.experiments.base import sized_here
from tests.cli.gating import SAMPLES, target, write_policy
from tests.cli.running import Memfit
from tests.selection import quick

HYBRID = SAMPLES / "qwen3.5-35b-a3b.yaml"
OLD = ("--mlx-version", "0.32.0")
LONG = ("--quantize", "4", "--context", "192k", "--device", "m5-max-128")


def test_an_older_mlx_needs_the_scores_that_newer_ones_do_not(memfit: Memfit) -> None:
    now = memfit("estimate", HYBRID, *LONG, "--json").json
    before = memfit("estimate", HYBRID, *LONG, *OLD, "--json").json
    # Measured on MLX 0.32.0, on a model of these sizes: 38.0 GB.
    assert before["peak_bytes"] == pytest.approx(38.0e9, rel=0.02)
    assert now["peak_bytes"] < 26e9
    (note,) = [note for note in now["notes"] if note["code"] == "mlx-version"]
    assert note["message"] == "the peak is for MLX 0.32.2 and newer; 38.6 GB on 0.32.0"
    assert "by the rules of mlx-lm 0.32.2 and MLX 0.32.0" in before["assumptions"]


@pytest.mark.exhaustive
def test_a_version_of_two_numbers_is_the_first_of_its_kind(memfit: Memfit) -> None:
    before = memfit("estimate", HYBRID, *LONG, *OLD, "--json").json
    assert memfit("estimate", HYBRID, *LONG, "--mlx-version", "0.32", "--json").json == before


@pytest.mark.exhaustive(daily=True)
def test_a_comparison_is_of_the_version_where_a_runtime_runs_on_it(memfit: Memfit) -> None:
    alone = memfit("estimate", HYBRID, *LONG, *OLD, "--json").json["peak_bytes"]
    result = memfit("compare", HYBRID, "--runtimes", "mlx-lm,vllm", *LONG, *OLD, "--json").json
    (peak,) = [figure for figure in result["figures"] if figure["name"] == "peak"]
    assert peak["values"][0]["value"] == alone
    native = memfit("compare", HYBRID, HYBRID, *LONG, *OLD, "--json").json
    (peak,) = [figure for figure in native["figures"] if figure["name"] == "peak"]
    assert [value["value"] for value in peak["values"]] == [alone, alone]


def test_a_version_of_mlx_vlm_names_the_runtime_too(memfit: Memfit) -> None:
    asked = (SAMPLES / "qwen3-vl-4b.yaml", "--context", "1k", "--mlx-vlm-version")
    older = memfit("estimate", *asked, "0.6.17", "--json").json
    newer = memfit("estimate", *asked, "0.7.10", "--json").json
    assert older["runtime"]["version"] == "0.6.17"
    assert older["peak_bytes"] - newer["peak_bytes"] == 1024 * 151_936 * 2
    assert "the class is that of mlx-vlm 0.7.10" in older["assumptions"]
    refused = memfit("estimate", *asked, "0.6.6")
    assert (refused.code, "rules are described from 0.6.7 on" in refused.err) == (3, True)
    refused = memfit("estimate", *asked, "0.6.7", "--runtime", "mlx-lm")
    assert (refused.code, "not run by mlx-vlm" in refused.err) == (2, True)


def test_each_cell_of_a_matrix_says_where_another_version_needs_more(memfit: Memfit) -> None:
    arguments = ("--matrix", "context=4k,192k", "--quantize", "4", "--device", "m5-max-128")
    cells = memfit("compare", HYBRID, *arguments, "--json").json["matrix"]["cells"]
    said = ["mlx-version" in {note["code"] for note in cell["notes"]} for cell in cells]
    assert said == [False, True]


def test_the_gate_gives_the_figures_of_the_version_in_its_policy(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"model": str(HYBRID), "device": "m5-max-128", "workload": {"context": "64k"}}
    versions = {"mlx_version": "0.32.0", "mlx_lm_version": "0.31.1"}
    write_policy(
        tmp_path,
        now=target({"peak": "100%"}, **keys),
        before=target({"peak": "100%"}, **keys, **versions),
        short=target({"peak": "100%"}, **keys, **{**versions, "mlx_version": 0.32}),
    )
    assert memfit("gate", "--update").code == 0
    kept = json.loads((tmp_path / "memfit.lock.json").read_text())["targets"]["before"]
    assert {key: kept["asked"][key] for key in versions} == versions
    now, before, short = memfit("gate", "--format", "json").json["targets"]
    arguments = ("--device", "m5-max-128", "--context", "64k", *OLD, "--mlx-lm-version", "0.31.1")
    asked = memfit("estimate", HYBRID, *arguments, "--json").json
    assert short["figures"] == before["figures"]
    assert before["figures"]["peak_bytes"] == asked["peak_bytes"] > now["figures"]["peak_bytes"]
    assert before["figures"]["state_bytes"] < now["figures"]["state_bytes"]
    assert "mlx-version" in [note["code"] for note in now["notes"]]


def test_a_baseline_of_another_version_answers_another_question(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"model": str(HYBRID), "device": "m5-max-128", "workload": {"context": "8k"}}
    limits = {"growth": {"peak": "1%"}}
    write_policy(tmp_path, one=target(limits, **keys))
    memfit("gate", "--update")
    write_policy(tmp_path, one=target(limits, **keys, mlx_version="0.32.0"))
    (report,) = memfit("gate", "--format", "json").json["targets"]
    assert "mlx_version not named, now 0.32.0" in report["message"]


def test_a_version_that_is_no_text_is_a_mistake_of_the_policy(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"model": str(HYBRID), "device": "m5-max-128", "workload": {"context": "8k"}}
    write_policy(tmp_path, one=target({"peak": "90%"}, **keys, mlx_version="newest"))
    run = memfit("gate")
    assert run.code == 2
    assert "targets.one.mlx_version: expected a version such as 0.32.1, got 'newest'" in run.err


@pytest.mark.parametrize(
    "plan", quick(["context", "experts", "offload", "ranks", "server"], ("experts",))
)
def test_plans_follow_the_version_and_say_that_another_needs_more(
    memfit: Memfit, plan: str
) -> None:
    length = "--tokens" if plan == "offload" else "--context"
    command = ("plan", plan, HYBRID, "--device", "m5-max-128", length, "192k", "--json")
    now, before = memfit(*command), memfit(*command, *OLD)
    assert now.json["schema"] == before.json["schema"]
    assert now.out != before.out
    (note,) = [note for note in now.json["notes"] if note["code"] == "mlx-version"]
    assert "the peak is for MLX 0.32.2 and newer; " in note["message"]


def test_estimates_of_tickets_follow_the_version(memfit: Memfit, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        f"schema: memfit.wired-scenario/1\ndevice: m5-max-128\nmodel: {HYBRID}\n"
        "policies: {p: {kind: max}}\n"
        "tickets: [{name: t, policy: p, size: 1GB, prefill: estimate(context=64k)}]\n"
    )
    runs = [memfit("plan", "wired", scenario, *version, "--json") for version in ((), OLD)]
    now, before = (run.json["tickets"][1]["size_bytes"] for run in runs)
    assert before > 2 * now
    assert "--mlx-version" in memfit("plan", "wired", scenario, "--mlx-version", "x").err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mlx-version", "latest"), "--mlx-version: expected a version such as 0.32.1"),
        (("--mlx-version", "0.20.0"), "are described from 0.29.0 on"),
        (("--mlx-lm-version", "0.20.0"), "its rules are described from 0.26.0 on"),
        (("--runtime", "vllm", *OLD), "vllm is not run by MLX"),
        (("--runtime", "mlx-moe", "--mlx-lm-version", "0.31.1"), "mlx-moe is not run by mlx-lm"),
    ],
)
def test_a_version_that_cannot_be_is_one_line(
    memfit: Memfit, arguments: tuple[str, ...], said: str
) -> None:
    run = memfit("estimate", HYBRID, "--device", "m5-max-128", *arguments)
    assert run.code in (2, 3)
    assert said in run.err
    assert run.err.count("\n") == 1


def test_on_a_mac_the_installed_versions_are_the_default(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm")
    monkeypatch.setattr("sys.platform", "darwin")
    arguments = ("estimate", HYBRID, "--device", "m5-max-128", "--json")
    (line,) = [text for text in memfit(*arguments).json["assumptions"] if "by the rules" in text]
    assert line == f"by the rules of mlx-lm {version('mlx-lm')} and MLX {version('mlx')}"


def test_a_run_is_compared_with_the_rules_of_the_installed_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.32.1")
    sized = sized_here(
        open_checkpoint(str(HYBRID)),
        find_device("m5-max-128"),
        Workload(prompt_tokens=64, batch=2, kv_bits=8),
        margin_bytes=0,
    )
    assert sized.runtime_model.runtime.versions[:2] == ((0, 32, 1), (0, 32, 1))


@pytest.mark.parametrize(
    "command",
    [
        ("estimate", HYBRID),
        pytest.param(("fits",), marks=pytest.mark.exhaustive),
        ("plan", "experts", HYBRID),
        pytest.param(("plan", "server", HYBRID), marks=pytest.mark.exhaustive),
        ("plan", "offload", HYBRID),
        ("plan", "ranks", HYBRID),
        ("plan", "ranks", "--fleet", SAMPLES / "plans" / "fleet.yaml"),
        ("plan", "growth", HYBRID, "--runtimes", "mlx-lm,vllm"),
        ("plan", "context", HYBRID),
    ],
)
def test_every_answer_names_the_versions_of_its_rules(
    memfit: Memfit, command: tuple[str | Path, ...]
) -> None:
    machine = () if "--fleet" in command else ("--device", "m5-max-128")
    run = memfit(*command, *machine, *OLD)
    assert "mlx-lm 0.32.2, MLX 0.32.0" in " ".join(run.out.split())
    data = memfit(*command, *machine, *OLD, "--json").json
    (named, *_) = data.get("runtimes") or [(data.get("models") or [data])[0]["runtime"]]
    assert named == {"name": "mlx-lm", "version": "0.32.2", "mlx_version": "0.32.0"}
