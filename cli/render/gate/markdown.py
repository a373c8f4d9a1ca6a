"""A gate's report as Markdown: the comment under a pull request, and the job summary."""

from collections.abc import Iterator

from memfit.cli.render.escape import escape_markdown
from memfit.cli.render.gate import text as gate_text
from memfit.estimators.results.gate import GateReport, TargetReport


def to_markdown(report: GateReport) -> str:
    """Return the report as a Markdown section that ends with a line feed."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: GateReport) -> Iterator[str]:
    yield f"## {'✅' if report.verdict == 'passed' else '❌'} {gate_text.headline(report)}"
    for target in report.targets:
        yield ""
        yield from _target(target)
    yield ""
    yield gate_text.footer(report)


def _target(target: TargetReport) -> Iterator[str]:
    yield f"### {escape_markdown(target.name)}: {gate_text.status(target)}"
    yield ""
    yield escape_markdown(gate_text.subject(target))
    if target.message is not None:
        yield ""
        yield f"**{escape_markdown(target.message)}**"
    if target.checks:
        yield ""
        yield "| Limit | Figure | Allowed | |"
        yield "|---|---:|---|---|"
    for check in target.checks:
        cells = (gate_text.limit_name(check), gate_text.figure(check), gate_text.allowed(check))
        yield f"| {' | '.join(map(escape_markdown, cells))} | {'✅' if check.passed else '❌'} |"
    broken = [check for check in target.checks if not check.passed]
    if broken:
        yield ""
    for check in broken:
        problem, remedy = gate_text.broken(check), gate_text.remedy(check)
        yield f"- **{escape_markdown(problem)}**; {escape_markdown(remedy)}"
    yield from _changes(target)
    if target.notes:
        yield ""
        yield from (f"- ⚠️ {escape_markdown(note.message)}" for note in target.notes)


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
        before, now, by = gate_text.amounts(change)
        yield f"| {gate_text.figure_name(change)} | {before} | {now} | {by} |"
