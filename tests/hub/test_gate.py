"""`memfit gate` on Hub names: a branch that moved, and a Hub that does not answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.gate.init_policy import _reference
from tests.cli.gating import target, write_policy
from tests.hub.conftest import NAME
from tests.hub.server import FakeHub, Fault
from tests.hub.test_command import Shell


@pytest.fixture
def shell(hub: FakeHub, tmp_path: Path) -> Shell:
    return Shell(hub, tmp_path)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Two targets on one name; the tests' Hub has only a part of the weights."""
    limits = {"peak": "90%", "basis": "bound", "growth": {"kv_per_token": "0%"}}
    one = target(limits, hub=NAME)
    return write_policy(tmp_path, one=one, two={**one, "device": "m4-max-64"})


def gate(shell: Shell, policy: Path, *options: str) -> tuple[int, Any]:
    ran = shell("gate", "--policy", str(policy), "--format", "json", *options)
    return ran.returncode, json.loads(ran.stdout)


@pytest.mark.exhaustive(daily=True)
def test_a_branch_that_moved_to_another_commit_is_reported(
    shell: Shell, hub: FakeHub, policy: Path
) -> None:
    assert gate(shell, policy, "--update")[0] == 0
    before = hub.repos[NAME].commit
    hub.repos[NAME].commit = "f" * 40
    code, report = gate(shell, policy)
    notes = [note["message"] for note in report["targets"][0]["notes"]]
    assert code == 0
    assert any(f"revision {before}, now {'f' * 40}" in note for note in notes)


def test_a_name_used_by_several_targets_is_requested_once(
    shell: Shell, hub: FakeHub, policy: Path
) -> None:
    assert gate(shell, policy, "--update")[0] == 0
    paths = hub.asked()
    assert len(paths) == len(set(paths))


def test_a_hub_that_does_not_answer_is_not_a_verdict(
    shell: Shell, hub: FakeHub, policy: Path
) -> None:
    assert gate(shell, policy, "--update")[0] == 0
    hub.faults.append(Fault("", "status", status=403))
    code, report = gate(shell, policy)
    assert (code, report["verdict"]) == (4, "unreachable")
    assert {one["status"] for one in report["targets"]} == {"unreachable"}


def test_the_baseline_keeps_the_commit_and_the_digest_of_every_header(
    shell: Shell, hub: FakeHub, policy: Path
) -> None:
    assert gate(shell, policy, "--update")[0] == 0
    lock = json.loads(policy.with_name("memfit.lock.json").read_text())
    kept = lock["targets"]["one"]["checkpoint"]
    assert kept["revision"] == hub.repos[NAME].commit
    assert len(kept["headers_sha256"]) == 3


def test_a_cached_listing_does_not_pass_unless_the_policy_allows_it(
    shell: Shell, hub: FakeHub, tmp_path: Path
) -> None:
    one = target({"peak": "90%", "basis": "bound"}, hub=NAME)
    policy = write_policy(tmp_path, one=one)
    assert gate(shell, policy)[0] == 0
    hub.faults.append(Fault("", "status", status=503))
    code, report = gate(shell, policy)
    assert (code, report["verdict"]) == (4, "unreachable")
    assert "allow_stale" in report["targets"][0]["message"]
    code, report = gate(shell, write_policy(tmp_path, one={**one, "allow_stale": True}))
    assert code == 0
    assert any("as it was last read" in note["message"] for note in report["targets"][0]["notes"])
    pinned = {**one, "hub": f"{NAME}@{hub.repos[NAME].commit}"}
    assert gate(shell, write_policy(tmp_path, one=pinned))[0] == 4  # never read before


def test_a_missing_directory_is_not_looked_up_on_the_hub(
    shell: Shell, hub: FakeHub, tmp_path: Path
) -> None:
    limits = {"peak": "90%", "basis": "bound"}
    for keys in ({"model": NAME}, {"path": NAME}):
        code, report = gate(shell, write_policy(tmp_path, one=target(limits, **keys)))
        assert (code, report["verdict"], hub.made) == (2, "invalid", [])


@pytest.mark.exhaustive(daily=True)
def test_a_revision_that_is_not_a_commit_is_named(
    shell: Shell, hub: FakeHub, tmp_path: Path
) -> None:
    limits = {"peak": "90%", "basis": "bound"}
    commit = hub.repos[NAME].commit
    for name, noted in ((NAME, True), (f"{NAME}@main", True), (f"{NAME}@{commit}", False)):
        code, report = gate(shell, write_policy(tmp_path, one=target(limits, hub=name)))
        codes = [note["code"] for note in report["targets"][0]["notes"]]
        assert (code, "not-pinned" in codes) == (0, noted)


def test_a_first_policy_is_pinned_to_the_commit() -> None:
    found = Checkpoint(id="org/a", source="hub", config={}, config_name="", revision="f" * 40)
    for model in ("org/a", "hub:org/a", "https://huggingface.co/org/a"):
        assert _reference(found, model) == f'hub: "org/a@{"f" * 40}"'
    assert _reference(replace(found, id="org/a@v1"), "org/a@v1") == 'hub: "org/a@v1"'
    chosen = replace(found, id="org/a:Q4_K_M", source="gguf")
    assert _reference(chosen, "org/a:Q4_K_M") == f'hub: "org/a@{"f" * 40}:Q4_K_M"'


def test_a_name_in_a_local_folder_is_noted_when_it_is_the_hubs(
    shell: Shell, hub: FakeHub, tmp_path: Path
) -> None:
    shell.directory = tmp_path
    assert "says so" not in shell("estimate", NAME).stdout
    (tmp_path / NAME.partition("/")[0]).mkdir()
    assert f"hub:{NAME} says so" in " ".join(shell("estimate", NAME, COLUMNS="500").stdout.split())
    assert "says so" not in shell("estimate", f"hub:{NAME}").stdout
