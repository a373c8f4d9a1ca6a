"""A gate's report as Markdown: the comment under a pull request, and the job summary."""

from collections.abc import Iterator

from memfit.cli.render.gate import words
from memfit.estimators.results.gate import GateReport, TargetReport


def to_markdown(report: GateReport) -> str:
    """Return the report as a Markdown section that ends with a line feed."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: GateReport) -> Iterator[str]:
    yield f"## {'✅' if report.verdict == 'passed' else '❌'} {words.headline(report)}"
    for target in report.targets:
        yield ""
        yield from _target(target)
    yield ""
    yield words.footer(report)


def _target(target: TargetReport) -> Iterator[str]:
    yield f"### {_escaped(target.name)}: {words.status(target)}"
    yield ""
    yield _escaped(words.subject(target))
    if target.message is not None:
        yield ""
        yield f"**{_escaped(target.message)}**"
    if target.checks:
        yield ""
        yield "| Limit | Figure | Allowed | |"
        yield "|---|---:|---|---|"
    for check in target.checks:
        cells = (words.limit_name(check), words.figure(check), words.allowed(check))
        yield f"| {' | '.join(map(_escaped, cells))} | {'✅' if check.passed else '❌'} |"
    broken = [check for check in target.checks if not check.passed]
    if broken:
        yield ""
    for check in broken:
        yield f"- **{_escaped(words.broken(check))}**; {_escaped(words.mending(check))}"
    yield from _changes(target)
    if target.notes:
        yield ""
        yield from (f"- ⚠️ {_escaped(note.message)}" for note in target.notes)


def _changes(target: TargetReport) -> Iterator[str]:
    if not target.changes:
        return
    yield ""
    if all(change.before == change.now for change in target.changes):
        yield "No figure differs from the baseline."
        return
    yield "| | Baseline | Now | Change |"
    yield "|---|---:|---:|---:|"
    for change in target.changes:
        if not change.before and not change.now:
            continue
        before, now, by = words.amounts(change)
        yield f"| {words.figure_name(change)} | {before} | {now} | {by} |"


def _escaped(text: str) -> str:
    for mark in ("\\", "|", "<", "`", "*", "_", "["):
        text = text.replace(mark, f"\\{mark}")
    return text
