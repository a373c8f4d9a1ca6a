"""A minimal runner of these workflows: steps in a shell, as GitHub and GitLab run them.

Expressions are looked up, not evaluated: an expression the tests do not know is a KeyError.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")
# https://docs.github.com/actions/reference/workflow-syntax-for-github-actions, "shell".
_SHELLS = {None: ("bash", "-e"), "bash": ("bash", "--noprofile", "--norc", "-eo", "pipefail")}

INSTALL = "Install memfit"  # the step's name, in the action and in the workflows


@dataclass(frozen=True)
class Job:
    """The result of a job: its code, both streams of its steps, and the job summary."""

    code: int
    output: str
    summary: str


@dataclass
class Runner:
    """Runs the steps of one job in ``workspace``; ``environment`` is the machine's own."""

    workspace: Path
    temporary: Path
    environment: Mapping[str, str]
    values: dict[str, str]
    actions: Mapping[str, Path]  # by the name in `uses` before the @
    installed: Path | None = None  # an environment that replaces INSTALL
    ran: list[str] = field(default_factory=list)
    _output: str = ""

    def run_workflow(self, workflow: Any) -> Job:
        """Run the jobs in order, each if its condition holds; return all together."""
        code = 0
        for name, job in workflow["jobs"].items():
            if self._wanted(job.get("if", ""), failed=code != 0):
                code = max(code, self.run(job["steps"], workflow.get("env", {})).code)
                for output, value in job.get("outputs", {}).items():
                    self.values[f"needs.{name}.outputs.{output}"] = self._filled(value)
        return Job(code, self._output, self._file("summary").read_text())

    def run(self, steps: list[Any], variables: Mapping[str, str]) -> Job:
        """Run the steps; after a failure only those with always() run."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.values["runner.temp"] = str(self.temporary)
        environment = {
            **self.environment,
            **variables,
            "RUNNER_TEMP": str(self.temporary),
            "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_STEP_SUMMARY": str(self._file("summary")),
        }
        code = self._steps(steps, environment, "")
        return Job(code, self._output, self._file("summary").read_text())

    def _steps(self, steps: list[Any], environment: dict[str, str], prefix: str) -> int:
        code = 0
        for step in steps:
            if not self._wanted(step.get("if", ""), failed=code != 0):
                continue
            code = max(code, self._step(step, environment, prefix))
            self._extend_path(environment)
        return code

    def _wanted(self, condition: str, *, failed: bool) -> bool:
        always, _, rest = condition.partition("always()")
        assert always == ""
        if failed and not condition:
            return False
        name = rest.removeprefix(" && ")
        return not name or bool(self.values.get(name))

    def _step(self, step: Any, environment: dict[str, str], prefix: str) -> int:
        self.ran.append(step.get("name") or step["uses"])
        if self.installed and step.get("name") == INSTALL:
            self._link(self.installed)
            return 0
        given = {name: self._filled(str(value)) for name, value in step.get("with", {}).items()}
        if "uses" in step:
            return self._use(step, given, environment)
        output = self._file("output")
        output.write_text("")
        done = subprocess.run(
            [*_SHELLS[step.get("shell")], str(self._script(self._filled(step["run"])))],
            cwd=self.workspace / self._filled(step.get("working-directory", ".")),
            env={
                **environment,
                **{name: self._filled(value) for name, value in step.get("env", {}).items()},
                "GITHUB_OUTPUT": str(output),
                "GITHUB_PATH": str(self._file("path")),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        self._output += done.stdout
        for line in output.read_text().splitlines():
            name, _, value = line.partition("=")
            self.values[f"steps.{prefix}{step['id']}.outputs.{name}"] = value
        return done.returncode

    def _use(self, step: Any, given: dict[str, str], environment: dict[str, str]) -> int:
        import yaml

        name = step["uses"].partition("@")[0]
        if name not in self.actions:
            self._keep(name, given)
            return 0
        action = yaml.safe_load((self.actions[name] / "action.yml").read_text())
        inputs = {key: spec["default"] for key, spec in action["inputs"].items()} | given
        assert inputs.keys() == action["inputs"].keys()
        self.values.update({f"inputs.{key}": value for key, value in inputs.items()})
        self.values["github.action_path"] = str(self.actions[name])
        code = self._steps(action["runs"]["steps"], environment, "")
        for output, spec in action["outputs"].items():
            expression = _EXPRESSION.fullmatch(spec["value"])
            assert expression
            value = self.values.get(expression[1], "")
            self.values[f"steps.{step.get('id', '')}.outputs.{output}"] = value
        return code

    def _keep(self, action: str, given: Mapping[str, str]) -> None:
        artifact = self.temporary / "artifacts" / given.get("name", "")
        if action == "actions/upload-artifact":
            artifact.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.workspace / given["path"], artifact)
        elif action == "actions/download-artifact":
            shutil.copytree(artifact, self.workspace, dirs_exist_ok=True)

    def _link(self, installed: Path) -> None:
        link = self.temporary / "memfit"
        if not link.exists():
            link.symlink_to(installed)

    def _filled(self, text: str) -> str:
        return _EXPRESSION.sub(lambda match: self.values[match[1]], text)

    def _script(self, text: str) -> Path:
        path = self._file("script")
        path.write_text(text)
        return path

    def _file(self, name: str) -> Path:
        path = self.temporary / f"_{name}"
        path.touch()
        return path

    def _extend_path(self, environment: dict[str, str]) -> None:
        added = self._file("path").read_text().splitlines()
        environment["PATH"] = os.pathsep.join((*reversed(added), self.environment["PATH"]))


def run_gitlab(job: Any, workspace: Path, environment: Mapping[str, str]) -> Job:
    """Run a GitLab job: before_script and script are one script of one shell."""
    lines = ["set -eo pipefail", *job["before_script"], *job["script"]]
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", "\n".join(lines)],
        cwd=workspace,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return Job(done.returncode, done.stdout, "")
