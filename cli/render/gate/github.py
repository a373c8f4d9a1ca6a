"""A gate's report as workflow commands: GitHub shows each at its line of the policy.

The form is ``::error file=…,line=…,title=…::message``
(https://docs.github.com/actions/reference/workflow-commands-for-github-actions).
"""

import os
from collections.abc import Iterator

from memfit.cli.render.gate import text as gate_text
from memfit.estimators.base.errors import PolicyError
from memfit.estimators.results.gate import GateReport, TargetReport


def to_github(report: GateReport) -> str:
    """Return an annotation for each error, broken limit and note, then the verdict."""
    return "\n".join(_lines(report)) + "\n"


def mistakes_to_github(error: PolicyError) -> str:
    """Return one annotation for each mistake of a policy."""
    lines = (
        _command("error", m.file, m.line, "memfit policy", f"{m.key}: {m.text}")
        for m in error.mistakes
    )
    return "\n".join(lines) + "\n"


def _lines(report: GateReport) -> Iterator[str]:
    for target in report.targets:
        yield from _target(target, report.policy)
    yield gate_text.headline(report)


def _target(target: TargetReport, policy: str) -> Iterator[str]:
    title = f"memfit: {target.name}"
    if target.message is not None:
        yield _command("error", policy, target.line, title, target.message)
    for check in target.checks:
        if not check.passed and target.status == "broken":
            text = f"{gate_text.broken(check)}; {gate_text.remedy(check)}"
            yield _command("error", policy, check.line, title, text)
    for note in target.notes:
        yield _command("warning", policy, target.line, title, note.message)


def _command(level: str, file: str, line: int, title: str, text: str) -> str:
    place = f"file={_property(_in_repository(file))},line={line},title={_property(title)}"
    return f"::{level} {place}::{_data(text)}"


def _in_repository(file: str) -> str:
    """The path from the repository's root, where GitHub looks for it."""
    root = os.environ.get("GITHUB_WORKSPACE")
    if not root:
        return file
    inside = os.path.relpath(os.path.realpath(file), os.path.realpath(root))
    return file if inside.startswith("..") else inside


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
