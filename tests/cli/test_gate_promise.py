"""The gate's promise: exit 0 means that every limit was computed from what is there now."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.estimators.checkpoint.config import model_config
from tests.cli.running import Memfit
from tests.fuzz.workspace import CONFIG, TENSORS
from tests.models import write_checkpoint, write_config
from tests.selection import examples

WORK = {"prompt_tokens": 300, "max_tokens": 4}
LIMITS: dict[str, Any] = {"peak": "90%", "load_peak": "90%", "context": 100}
GROWTH = {**LIMITS, "growth": {"weights": "0%", "peak": "5%"}}
TARGETS = {
    "plain": ("config-only", LIMITS),
    "sharded": ("shards", GROWTH),
    "again": ("one", GROWTH),
}


def write_models(root: Path) -> None:
    write_config(root / "config-only", CONFIG)
    write_checkpoint(root / "shards", CONFIG, TENSORS, shards=3)
    write_checkpoint(root / "one", CONFIG, TENSORS)


def write_policy(root: Path) -> None:
    targets = {
        name: {"path": path, "device": "m4-pro-24", "workload": WORK, "limits": limits}
        for name, (path, limits) in TARGETS.items()
    }
    text = json.dumps({"schema": "memfit.policy/1", "targets": targets})
    (root / "memfit.yaml").write_text(text)


@pytest.fixture(autouse=True)
def folder(memfit: Memfit, empty_directory: Path) -> Path:
    """The current directory, with three models, their policy and its baseline."""
    write_models(empty_directory)
    write_policy(empty_directory)
    assert memfit("gate", "--update").code == 0
    return empty_directory


def cut(name: str) -> Callable[[Path], object]:
    return lambda model: os.truncate(model / name, (model / name).stat().st_size // 2)


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda model: (model / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def gone(model: Path) -> None:
    shutil.rmtree(model)


def pipe(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")


def loop(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")


def pointer(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.write_text("version https://git-lfs.github.com/spec/v1\n")


def missing_weights(model: Path) -> None:
    for file in list(model.glob("*.safetensors"))[:1]:
        file.unlink()


# What can have happened to a target before a run; some leave a model that passes or breaks a limit.
FAULTS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda model: None,
    "gone": gone,
    "config cut": cut("config.json"),
    "more layers": config(num_hidden_layers=40, hidden_size=8192, intermediate_size=30_000),
    "one layer more": config(num_hidden_layers=3),
    "a key that nobody knows": config(new_attention={"kind": 1}),
    "another class": config(model_type="unheard_of"),
    "pipe": pipe,
    "link to itself": loop,
    "git lfs": pointer,
    "shard missing": missing_weights,
}
# And to the baseline.
BASELINES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "gone": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_text('{"schema": "memfit.lock/1", "targets": {}}'),
}


# Most targets are in order, or almost no run would pass.
FAULT = st.one_of(st.just("nothing"), st.just("nothing"), st.sampled_from(sorted(FAULTS)))


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.fixed_dictionaries(dict.fromkeys(TARGETS, FAULT)),
    st.one_of(st.just("nothing"), st.sampled_from(sorted(BASELINES))),
)
def test_exit_0_means_that_every_limit_was_computed_from_what_is_there(
    memfit: Memfit, folder: Path, faults: dict[str, str], baseline: str
) -> None:
    lock = folder / "memfit.lock.json"
    kept = lock.read_bytes()
    for name, (path, _) in TARGETS.items():
        FAULTS[faults[name]](folder / path)
    BASELINES[baseline](lock)
    try:
        run = memfit("gate", "--format", "json")
        assert run.code in (0, 1, 2, 3)
        if run.code == 0:
            assert_computed(memfit, run.json)
    finally:
        for path, _ in TARGETS.values():
            shutil.rmtree(folder / path, ignore_errors=True)
        write_models(folder)
        lock.write_bytes(kept)


def assert_computed(memfit: Memfit, report: Any) -> None:
    assert [target["name"] for target in report["targets"]] == list(TARGETS)
    for target in report["targets"]:
        path, limits = TARGETS[target["name"]]
        asked = {*limits} - {"growth"} | {f"growth.{key}" for key in limits.get("growth", ())}
        checks = {check["limit"]: check for check in target["checks"]}
        assert checks.keys() == asked
        assert all(check["passed"] is True for check in checks.values())
        now = memfit("estimate", path, "--device", "m4-pro-24", "--prompt-tokens", "300",
                     "--max-tokens", "4", "--json").json  # fmt: skip
        assert checks["peak"]["figure"] == now["peak_bytes"]


def during_the_read(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Let a change happen once, between the config of the first model and its weights."""
    pending = [change]

    def read_then_change(files: Any, *names: str) -> Any:
        found = model_config(files, *names)
        if pending:
            pending.pop()()
        return found

    module = "memfit.estimators.checkpoint.local.directory"
    monkeypatch.setattr(f"{module}.model_config", read_then_change)


def test_a_model_that_is_replaced_while_it_is_read_does_not_pass(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_the_read(monkeypatch, lambda: config(num_hidden_layers=3)(folder / "config-only"))
    run = memfit("gate")
    assert run.code == 2
    assert "was changed while it was read; run again" in run.out
    assert memfit("gate").code == 0


def test_a_replaced_directory_writes_no_baseline(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        (folder / "config-only").rename(folder / "old")
        write_config(folder / "config-only", {**CONFIG, "num_hidden_layers": 3})

    kept = (folder / "memfit.lock.json").read_bytes()
    during_the_read(monkeypatch, replace)
    assert memfit("gate", "--update").code == 2
    assert (folder / "memfit.lock.json").read_bytes() == kept


def test_a_policy_that_is_edited_during_a_run_counts_for_the_next(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "memfit.yaml"
    stricter = path.read_text().replace("90%", "0.00001%")
    during_the_read(monkeypatch, lambda: path.write_text(stricter))
    assert memfit("gate").code == 0
    assert memfit("gate").code == 1


def test_an_update_keeps_targets_that_were_written_during_its_run(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "memfit.lock.json"
    other = json.loads(path.read_bytes())
    other["targets"]["again"]["figures"]["peak_bytes"] += 1
    during_the_read(monkeypatch, lambda: path.write_text(json.dumps(other)))
    assert memfit("gate", "--update", "--target", "plain").code == 0
    assert json.loads(path.read_bytes())["targets"]["again"] == other["targets"]["again"]


def test_updates_at_the_same_time_lose_nothing(folder: Path) -> None:
    (folder / "memfit.lock.json").unlink()
    main = "from memfit.cli.app import main; main()"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", main, "gate", "--update", "--target", name],
            cwd=folder,
            stderr=subprocess.PIPE,
        )
        for name in TARGETS
    ]
    assert [(process.communicate()[1], process.returncode)[1] for process in running] == [0, 0, 0]
    written = json.loads((folder / "memfit.lock.json").read_bytes())
    assert written["targets"].keys() == TARGETS.keys()
