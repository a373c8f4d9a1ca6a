"""Write a gate's report to standard output, files, and GitHub's job summary."""

import os
from collections.abc import Sequence
from pathlib import Path

from memfit.cli.render.output import DRAWN, Format, deliver, format_of, rendered
from memfit.cli.render.view import view_of
from memfit.cli.render.views.gate import MistakesView
from memfit.estimators.base.errors import InputError, PolicyError
from memfit.estimators.gate.report import GateReport

# GitHub shows this Markdown on the page of a run (docs.github.com, "Workflow commands").
SUMMARY = "GITHUB_STEP_SUMMARY"


def parse_outputs(
    texts: Sequence[str], formats: Sequence[Format]
) -> tuple[tuple[Format, Path], ...]:
    """Return the formats and files of texts such as ``junit=report.xml``, or ``report.html``.

    Raises:
        InputError: when one is not of that form, or a file is named twice.
    """
    found: list[tuple[Format, Path]] = []
    for text in texts:
        named, _, name = text.partition("=")
        if not name and Path(text).suffix:
            named, name = format_of(Path(text), formats), text
        form = next((each for each in formats if each == named), None)
        if form is None or not name:
            raise InputError(
                f"--output {text!r}: write it as FORMAT=FILE or FILE.html; formats are"
                f" {', '.join(formats)}"
            )
        if Path(name) in [path for _, path in found]:
            raise InputError(f"--output {text!r}: the file is named twice")
        found.append((form, Path(name)))
    return tuple(found)


def deliver_report(report: GateReport, form: Format, files: Sequence[tuple[Format, Path]]) -> None:
    """Write the report to files and to standard output.

    In the format ``github`` the job summary gets the Markdown as well.

    Raises:
        InputError: when a file cannot be written.
    """
    for other, path in (*files, (form, None)):
        deliver(view_of(report, plot=other in DRAWN), other, path)
    if "github" in (form, *(other for other, _ in files)):
        _append_summary(rendered(view_of(report), "markdown", to_file=True))


def deliver_mistakes(error: PolicyError, form: Format) -> None:
    """Annotate the lines of a policy that cannot be read, where a reviewer looks."""
    if form == "github":
        deliver(MistakesView(error), form, None)


def _append_summary(text: str) -> None:
    path = os.environ.get(SUMMARY)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{SUMMARY}: {path}: cannot be written: {error.strerror}") from None
