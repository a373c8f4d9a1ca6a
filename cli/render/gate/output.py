"""Write a gate's report to standard output, files, and GitHub's job summary."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from memfit.cli.render.output import write_whole
from memfit.estimators.base.errors import InputError, PolicyError
from memfit.estimators.results.gate import GateReport

# The file whose Markdown GitHub shows on the page of a run (docs.github.com, "Workflow commands").
SUMMARY = "GITHUB_STEP_SUMMARY"


def parse_outputs(texts: Sequence[str], formats: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Return the formats and files of texts such as ``junit=report.xml``.

    Raises:
        InputError: when one is not of that form, or a file is named twice.
    """
    found: list[tuple[str, Path]] = []
    for text in texts:
        form, _, name = text.partition("=")
        if form not in formats or not name:
            raise InputError(
                f"--output {text!r}: write it as FORMAT=FILE; formats are {', '.join(formats)}"
            )
        if Path(name) in [path for _, path in found]:
            raise InputError(f"--output {text!r}: the file is named twice")
        found.append((form, Path(name)))
    return tuple(found)


def deliver(report: GateReport, form: str, files: Sequence[tuple[str, Path]]) -> None:
    """Write the report to standard output and to files.

    In the format ``github`` the job summary gets the Markdown as well.

    Raises:
        InputError: when a file cannot be written.
    """
    for other, path in files:
        write_whole(path, _rendered(report, other, to_file=True))
    sys.stdout.write(_rendered(report, form, to_file=False))
    sys.stdout.flush()
    if "github" in (form, *(other for other, _ in files)):
        _append_summary(_rendered(report, "markdown", to_file=True))


def deliver_mistakes(error: PolicyError, form: str) -> None:
    """With the format ``github``, annotate the lines of an invalid policy."""
    if form == "github":
        from memfit.cli.render.gate.github import mistakes_to_github

        sys.stdout.write(mistakes_to_github(error))
        sys.stdout.flush()


def _rendered(report: GateReport, form: str, *, to_file: bool) -> str:
    if form == "github":
        from memfit.cli.render.gate.github import to_github

        return to_github(report)
    if form == "junit":
        from memfit.cli.render.gate.junit import to_junit

        return to_junit(report)
    if form == "markdown":
        from memfit.cli.render.gate.markdown import to_markdown

        return to_markdown(report)
    if form == "json":
        from memfit.cli.render.data import to_json

        return to_json(report)
    from memfit.cli.render.gate.table import to_table

    return to_table(report, to_file=to_file)


def _append_summary(text: str) -> None:
    path = os.environ.get(SUMMARY)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{SUMMARY}: {path}: cannot be written: {error.strerror}") from None
