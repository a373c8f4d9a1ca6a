"""CI jobs of action.yml and docs/ci.md, run by a shell as a runner would run them."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from packaging.requirements import Requirement

from tests.ci.conftest import ROOT, git
from tests.ci.runner import INSTALL, Job, Runner, run_gitlab
from tests.models import QWEN3_4B, write_config

_BLOCK = re.compile(r"^```yaml\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    name: yaml.safe_load(text)
    for name, text in _BLOCK.findall((ROOT / "docs" / "ci.md").read_text(encoding="utf-8"))
}
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
_MODULES = (
    *("venv", "pip", "logging", "sitecustomize", "usercustomize"),
    *("typer", "memfit", "ensurepip"),
)
# Replaces gh, which would need a pull request; it records its arguments.
_GH = """#!/bin/sh
printf '%s\\n' "$@" >"$HOME/gh-arguments"
cp "$5" "$HOME/gh-comment"
"""


@pytest.fixture
def runner(repository: Path, source: Path, machine: dict[str, str], tmp_path: Path) -> Runner:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "gh").write_text(_GH)
    (tools / "gh").chmod(0o755)
    return Runner(
        repository,
        tmp_path / "runner",
        {**machine, "HOME": str(tmp_path), "PATH": f"{tools}:{machine['PATH']}"},
        {
            "github.token": "token",
            "github.repository": "somebody/chat",
            "github.event.pull_request.number": "7",
            "github.event.pull_request.base.sha": git(repository, "rev-parse", "HEAD"),
        },
        {"OWNER/memfit": source},
    )


@pytest.fixture
def ready(runner: Runner) -> Runner:
    """The same runner with this checkout's memfit; other tests check the installation."""
    if not (Path(sys.prefix) / "bin" / "memfit").exists():
        pytest.skip("memfit is not installed here")
    runner.installed = Path(sys.prefix)
    return runner


def upgrade(repository: Path) -> None:
    """The same model without quantisation: too large for 8 GB of memory."""
    write_config(repository / "models" / "chat", QWEN3_4B)


def _plant(runner: Runner) -> None:
    """Put modules into the workspace that would replace those of Python, pip and memfit."""
    code = f"open({str(runner.temporary / 'ran')!r}, 'a').write(__name__)\n"
    for name in _MODULES:
        (runner.workspace / f"{name}.py").write_text(code)
    tools = runner.workspace / "tools"
    tools.mkdir()
    for name in ("python3", "python", "pip", "mktemp", "cat"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >>{runner.temporary / 'ran'}\n")
        (tools / name).chmod(0o755)
    settings = runner.workspace / "pip.conf"
    settings.write_text(f"[global]\npython = {tools / 'python3'}\n[install]\ntarget = here\n")
    # What a workflow sets for its other steps.
    runner.environment = {
        **runner.environment,
        "PATH": f"{tools}:{runner.environment['PATH']}",
        "PYTHONPATH": str(runner.workspace),
        "PYTHONHOME": str(runner.workspace),
        "PIP_CONFIG_FILE": str(settings),
        "PIP_PYTHON": str(tools / "python3"),
        "PIP_TARGET": str(runner.workspace / "target"),
    }


def run_action(runner: Runner, inputs: Mapping[str, str]) -> Job:
    step = {"id": "memfit", "uses": "OWNER/memfit@v0.2.0", "with": dict(inputs)}
    return runner.run([step], {})


def outputs(runner: Runner) -> dict[str, str]:
    return {name: runner.values[f"steps.memfit.outputs.{name}"] for name in ACTION["outputs"]}


def test_every_documented_workflow_runs_here() -> None:
    assert set(BLOCKS) == {
        ".github/workflows/memory.yml",
        ".github/workflows/upgrade.yml",
        ".gitlab-ci.yml",
        ".pre-commit-config.yaml",
    }


@pytest.mark.exhaustive
def test_a_model_that_fits_passes_and_is_reported(runner: Runner) -> None:
    workflow = BLOCKS[".github/workflows/memory.yml"]
    _plant(runner)
    job = runner.run_workflow(workflow)
    assert job.code == 0, job.output
    assert not (runner.temporary / "ran").exists()
    # The memfit that ran was installed from the action's own checkout.
    installed = list(runner.temporary.glob("memfit/lib/python*/site-packages/memfit/cli/app.py"))
    assert len(installed) == 1
    assert "Gate passed" in job.summary
    assert "::error" not in job.output
    assert (Path(runner.environment["HOME"]) / "gh-arguments").read_text().splitlines()[:3] == [
        "pr",
        "comment",
        "7",
    ]


def test_an_upgrade_that_does_not_fit_fails_with_an_annotation(ready: Runner) -> None:
    upgrade(ready.workspace)
    workflow = BLOCKS[".github/workflows/memory.yml"]
    job = ready.run_workflow(workflow)
    assert job.code == 1
    annotated = re.findall(r"::error file=([^,]*),line=(\d+),", job.output)
    policy = (ready.workspace / "memfit.yaml").read_text().splitlines()
    assert any(policy[int(line) - 1].strip().startswith("peak:") for _, line in annotated)
    assert {file for file, _ in annotated} == {"memfit.yaml"}
    assert "Gate not passed" in job.summary
    # The comment is posted although the gate failed, and has the report.
    assert (Path(ready.environment["HOME"]) / "gh-comment").read_text() == job.summary


def test_the_action_outputs_its_reports(ready: Runner) -> None:
    assert run_action(ready, {}).code == 0
    found = outputs(ready)
    assert found["exit-code"] == "0"
    assert json.loads(Path(found["json"]).read_text())["schema"].startswith("memfit.gate/")
    assert ElementTree.parse(found["junit"]).getroot().get("failures") == "0"
    assert Path(found["markdown"]).read_text().startswith("## ")


def test_a_mistake_in_the_policy_is_in_the_summary(ready: Runner) -> None:
    policy = ready.workspace / "memfit.yaml"
    policy.write_text(policy.read_text().replace("peak: 90%", "peak: most", 1))
    job = run_action(ready, {})
    assert job.code == 2
    assert "nothing was checked" in job.summary
    assert "peak" in job.summary
    assert outputs(ready) == {"exit-code": "2", "markdown": "", "json": "", "junit": ""}


def test_inputs_are_text_and_never_run_as_script(ready: Runner) -> None:
    hostile = '$(touch "$RUNNER_TEMP/broken-out"); `touch "$RUNNER_TEMP/broken-out"` "'
    names = ACTION["inputs"].keys() - {"package", "working-directory"}
    inputs = dict.fromkeys(names, hostile)
    (ready.workspace / "in $(touch x)").mkdir()
    inputs |= {"working-directory": "in $(touch x)"}
    job = run_action(ready, inputs)
    assert job.code == 2
    assert "memfit: " in job.output
    assert not (ready.temporary / "broken-out").exists()
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]


@pytest.mark.exhaustive
def test_the_action_takes_targets_and_two_models(ready: Runner) -> None:
    def code(**inputs: str) -> int:
        return run_action(ready, inputs).code

    name = re.findall(r"^  (\S+):$", (ready.workspace / "memfit.yaml").read_text(), re.M)[0]
    assert code(targets=f"{name}\n") == 0
    assert code(targets="nobody") == 2
    shutil.copytree(ready.workspace / "models" / "chat", ready.workspace / "models" / "old")
    upgrade(ready.workspace)
    assert code(old="models/old", new="models/old") == 0
    assert code(old="models/old", new="models/chat") == 1
    assert code(old="models/old") == 2


def test_no_module_of_the_workspace_is_imported(ready: Runner) -> None:
    _plant(ready)
    job = run_action(ready, {})
    assert job.code == 0, job.output
    assert not (ready.temporary / "ran").exists()


@pytest.mark.parametrize("name", [name for name in BLOCKS if "workflows" in name])
def test_no_job_has_a_token_that_it_does_not_need(name: str) -> None:
    workflow = BLOCKS[name]
    for job in workflow["jobs"].values():
        permissions = job.get("permissions", workflow["permissions"])
        uses = [step.get("uses", "") for step in job["steps"]]
        commands = " ".join(step.get("run", "") for step in job["steps"])
        wanted = {"contents": "read"} if any("checkout" in each for each in uses) else {}
        wanted |= {"pull-requests": "write"} if "gh pr comment" in commands else {}
        assert permissions == wanted
        for step in job["steps"]:
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.exhaustive
def test_an_upgrade_is_compared_with_the_base_branch(runner: Runner) -> None:
    workflow = BLOCKS[".github/workflows/upgrade.yml"]
    steps = workflow["jobs"]["gate"]["steps"]
    _plant(runner)
    fits = runner.run_workflow(workflow)
    assert not (runner.temporary / "ran").exists()
    assert fits.code == 0, fits.output
    kept = next(step["with"]["path"] for step in steps if step.get("name") == "Keep the report")
    assert (runner.workspace / kept).exists()
    assert runner.ran.count("Keep the report") == 1
    assert "Gate passed" in fits.summary
    (runner.workspace / kept).unlink()
    upgrade(runner.workspace)
    again = [
        step
        for step in steps
        if step.get("name") not in (INSTALL, "Take the model of the base branch")
    ]
    larger = runner.run(again, {})
    assert larger.code == 1, larger.output
    assert (runner.workspace / kept).exists()
    assert runner.ran.count("Keep the report") == 2
    assert "Gate passed" not in larger.summary.removeprefix(fits.summary)


@pytest.mark.exhaustive
def test_gitlab_receives_its_reports(
    repository: Path, machine: dict[str, str], tmp_path: Path
) -> None:
    job = BLOCKS[".gitlab-ci.yml"]["memory"]
    artifacts = job["artifacts"]
    environment = {**machine, "TMPDIR": str(tmp_path)}
    for code in (0, 1):
        done = run_gitlab(job, repository, environment)
        assert done.code == code, done.output
        suites = ElementTree.parse(repository / artifacts["reports"]["junit"]).getroot()
        assert (suites.get("failures") != "0") is bool(code)
        for path in artifacts["paths"]:
            (repository / path).unlink()
        upgrade(repository)
        (tools,) = tmp_path.glob("tmp.*")
        job = {**job, "before_script": [f"tools={tools}"]}


def test_the_hook_that_is_documented_exists() -> None:
    wanted = BLOCKS[".pre-commit-config.yaml"]["repos"][0]["hooks"]
    assert [each["id"] for each in wanted] == [HOOK["id"]]
    assert (HOOK["language"], HOOK["pass_filenames"]) == ("python", False)
    for file in ("memfit.yaml", "memfit.lock.json", "models/chat/config.json", "a.safetensors"):
        assert re.search(HOOK["files"], file)
    assert not re.search(HOOK["files"], "README.md")


def test_the_hook_has_the_pinned_dependencies() -> None:
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.partition("--hash")[0].strip() for line in text.splitlines()]
    pins = [line for line in lines if "==" in line and not line.startswith("setuptools")]
    assert HOOK["additional_dependencies"] == pins, "copy them from requirements.txt"


@pytest.mark.exhaustive
def test_the_hook_runs(repository: Path, source: Path, machine: dict[str, str]) -> None:
    # As pre-commit does: the hook's repository into an environment, the entry in the root.
    # The versions are those installed here: newer ones than the pinned may be out.
    wanted = map(Requirement, HOOK["additional_dependencies"])
    names = [each.name for each in wanted if not each.marker or each.marker.evaluate()]
    pins = [f"{name}=={metadata.version(name)}" for name in names]
    job = {
        "before_script": [
            "python3 -m venv .hook",
            shlex.join([".hook/bin/pip", "install", "-q", str(source), *pins]),
        ],
        "script": [f'PATH="$PWD/.hook/bin:$PATH" {HOOK["entry"]}'],
    }
    assert run_gitlab(job, repository, machine).code == 0
    upgrade(repository)
    job["before_script"] = []
    assert run_gitlab(job, repository, machine).code == 1
