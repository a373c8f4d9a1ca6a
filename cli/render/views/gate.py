"""A gate's report as a document, as annotations and as suites of test cases."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memfit.cli.render.document import Bar, BarChart, Document, Heading, Pair, Table, Text, Verdict
from memfit.cli.render.views import gate_text
from memfit.cli.render.writers.github import Annotation
from memfit.cli.render.writers.junit import Case, Suite
from memfit.estimators.base.errors import PolicyError
from memfit.estimators.base.units import Units
from memfit.estimators.gate.limits import LimitCheck
from memfit.estimators.gate.report import GateReport, TargetReport

_COLOURS = {
    "passed": "green",
    "broken": "red",
    "invalid": "red",
    "undecided": "yellow",
    "unreachable": "yellow",
}


class GateView(NamedTuple):
    result: GateReport
    plot: bool = False

    def document(self) -> Document:
        """Return each target with its limits, then the verdict."""
        report, headline = self.result, gate_text.headline(self.result)
        return (
            *(part for target in report.targets for part in _target(target)),
            Verdict(headline, _COLOURS[report.verdict], is_title=True),
            *(_charts(report) if self.plot else ()),
            Text([gate_text.footer(report)], style="dim"),
        )

    def annotations(self) -> Iterator[Annotation | str]:
        """Yield an annotation for each error, broken limit and note, then the verdict."""
        for target in self.result.targets:
            yield from _annotations(target, self.result.policy)
        yield gate_text.headline(self.result)

    def suites(self) -> tuple[str, Sequence[Suite]]:
        """Return a suite for each target, with a test case for each limit."""
        targets = self.result.targets
        return "memfit gate", [
            Suite(target.name, list(_cases(target, self.result.policy))) for target in targets
        ]


class MistakesView(NamedTuple):
    """The mistakes of a policy that cannot be read."""

    error: PolicyError

    def annotations(self) -> Iterator[Annotation]:
        for each in self.error.mistakes:
            text = f"{each.key}: {each.text}"
            yield Annotation("error", each.file, each.line, "memfit policy", text)


def _target(target: TargetReport) -> Iterator[Heading | Text | Table]:
    status = gate_text.status(target)
    yield Heading(target.name, level=3, status=status, colour=_COLOURS[target.status])
    yield Text([gate_text.subject(target)], style="dim")
    if target.message is not None:
        yield Text([target.message], indent=2, strong=True)
    if target.checks:
        rows = [_check(check) for check in target.checks]
        headings = ("Limit", "Figure", "Allowed", "")
        yield Table(headings, rows, align="lrl", wrapped=(2,), gap=False)
    if run := gate_text.smaller_run(target.figures):
        yield Text([run], indent=2)
    broken = [check for check in target.checks if check.is_broken]
    problems = [Pair(gate_text.broken(check), gate_text.remedy(check)) for check in broken]
    yield Text(problems, mark="-", indent=2)
    yield from _changes(target)
    yield Text([note.message for note in target.notes], mark="!", indent=2)


def _charts(report: GateReport) -> Iterator[BarChart]:
    """Each figure in bytes with its limit, to one scale."""
    bars = [
        Bar(f"{target.name}: {gate_text.limit_name(check)}", (check.figure,), check.allowed)
        for target in report.targets
        for check in target.checks
        if check.unit == "bytes" and check.sense == "at most"
        if isinstance(check.figure, int) and isinstance(check.allowed, int)
    ]
    if bars:
        title = "Figures and their limits"
        yield BarChart(title=title, kinds=("figure",), bars=bars, units=Units.GB, limit="limit")


def _check(check: LimitCheck) -> tuple[str | bool, ...]:
    texts = (gate_text.limit_name(check), gate_text.figure(check), gate_text.allowed(check))
    return (*texts, "not decided" if check.undecided_by else check.passed)


def _changes(target: TargetReport) -> Iterator[Text | Table]:
    if not target.changes:
        return
    if all(change.before == change.now for change in target.changes):
        yield Text(["No figure differs from the baseline."], only="page")
        return
    rows = [
        (gate_text.figure_name(change), *gate_text.amounts(change))
        for change in target.changes
        if change.before or change.now
    ]
    yield Table(("", "Baseline", "Now", "Change"), rows, only="page")


def _annotations(target: TargetReport, policy: str) -> Iterator[Annotation]:
    title = f"memfit: {target.name}"
    if target.message is not None:
        yield Annotation("error", policy, target.line, title, target.message)
    for check in target.checks:
        if check.is_broken:
            text = f"{gate_text.broken(check)}; {gate_text.remedy(check)}"
            yield Annotation("error", policy, check.line, title, text)
    for note in target.notes:
        yield Annotation("warning", policy, target.line, title, note.message)


def _cases(target: TargetReport, policy: str) -> Iterator[Case]:
    if target.message is not None:
        yield Case(gate_text.status(target), policy, target.line, "error", target.message)
    for check in target.checks:
        case = Case(gate_text.limit_name(check), policy, check.line)
        if check.undecided_by:
            case = case._replace(outcome="skipped", message="a figure of it is a bound")
        elif not check.passed:
            problem, remedy = gate_text.broken(check), gate_text.remedy(check)
            case = case._replace(outcome="failure", message=problem, text=remedy)
        yield case
