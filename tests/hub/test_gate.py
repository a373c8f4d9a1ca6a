"""`memfit gate` on Hub names: a branch that moved, and a Hub that does not answer."""

import json
from pathlib import Path
from typing import Any

import pytest

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
    one = target(limits, model=NAME)
    return write_policy(tmp_path, one=one, two={**one, "device": "m4-max-64"})


def gate(shell: Shell, policy: Path, *options: str) -> tuple[int, Any]:
    ran = shell("gate", "--policy", str(policy), "--format", "json", *options)
    return ran.returncode, json.loads(ran.stdout)


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
