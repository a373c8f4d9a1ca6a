"""Workflow commands: GitHub shows each at its line of a file.

The form is ``::error file=…,line=…,title=…::message``
(https://docs.github.com/actions/reference/workflow-commands-for-github-actions).
"""

import os
import re
from collections.abc import Iterable
from typing import Protocol

from memfit.cli.render.document import Annotation
from memfit.cli.render.output import visible


class HasAnnotations(Protocol):
    """What this writer needs."""

    def annotations(self) -> Iterable[Annotation | str]:
        """Yield annotations, and lines of the log."""


# A line that starts with "::" is a command to the runner
# (https://github.com/actions/runner, ActionCommand.cs); `visible` breaks the older "##[".
_COMMAND = re.compile(r"(?<=:)(?=:)")


def write(view: HasAnnotations, *, to_file: bool) -> str:
    """Return the view's annotations, a line each."""
    return "".join(f"{_line(each)}\n" for each in view.annotations())


def _line(each: Annotation | str) -> str:
    if isinstance(each, str):
        return _COMMAND.sub(" ", _data(each))
    title, file = _property(each.title), _property(_in_repository(each.file))
    return f"::{each.level} file={file},line={each.line},title={title}::{_data(each.text)}"


def _in_repository(file: str) -> str:
    """The path from the repository's root, where GitHub looks for it."""
    root = os.environ.get("GITHUB_WORKSPACE")
    if not root:
        return file
    inside = os.path.relpath(os.path.realpath(file), os.path.realpath(root))
    return file if inside.startswith("..") else inside


def _data(text: str) -> str:
    return visible(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
