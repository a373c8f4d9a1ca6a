"""A gate's report, and every text of it: as a document, annotations and suites of test cases."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memfit.cli.render.document import (
    Annotation,
    Bar,
    BarChart,
    Case,
    Document,
    Heading,
    Pair,
    Suite,
    Table,
    Text,
    Verdict,
)
from memfit.cli.render.view import view
from memfit.estimators.base.errors import PolicyError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.gate.figures import COMPARED, FigureChange, SmallerRun
from memfit.estimators.gate.limit_values import MISS_UNIT, MISSES
from memfit.estimators.gate.limits import IMPLIED, LIMITS, LimitCheck
from memfit.estimators.gate.remedies import SETTINGS
from memfit.estimators.gate.report import GateReport, TargetReport, TargetStatus
from memfit.estimators.machine.device import name_as_sold

_NO_FIGURE = {"tokens": "none fits", "experts": "no experts"}

_STATUSES: dict[TargetStatus, tuple[str, str]] = {
    "passed": ("passed", "green"),
    "broken": ("beyond its limits", "red"),
    "invalid": ("invalid input", "red"),
    "undecided": ("not decided", "yellow"),
    "unreachable": ("not reachable", "yellow"),
}
"""What a report calls each status, and its colour."""


@view(GateReport)
class GateView(NamedTuple):
    result: GateReport
    plot: bool = False

    def document(self) -> Document:
        """Return each target with its limits, then the verdict."""
        report, headline = self.result, _headline(self.result)
        return (
            *(part for target in report.targets for part in _target(target)),
            Verdict(headline, _STATUSES[report.verdict][1], is_title=True),
            *(_charts(report) if self.plot else ()),
            Text([_footer(report)], style="dim"),
        )

    def annotations(self) -> Iterator[Annotation | str]:
        """Yield an annotation for each error, broken limit and note, then the verdict."""
        for target in self.result.targets:
            yield from _annotations(target, self.result.policy)
        yield _headline(self.result)

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
    status, colour = _STATUSES[target.status]
    yield Heading(target.name, level=3, status=status, colour=colour)
    yield Text([_subject(target)], style="dim")
    if target.message is not None:
        yield Text([target.message], indent=2, strong=True)
    if target.checks:
        rows = [_check(check) for check in target.checks]
        headings = ("Limit", "Figure", "Allowed", "")
        yield Table(headings, rows, align="lrl", wrapped=(2,), gap=False)
    if target.figures and (run := target.figures.peak_of):
        text = f"the peak is {_at(run)}: that takes more than the target's workload"
        yield Text([text], indent=2)
    broken = [check for check in target.checks if check.is_broken]
    problems = [Pair(_broken(check), _remedy(check)) for check in broken]
    yield Text(problems, mark="-", indent=2)
    yield from _changes(target)
    yield Text([note.message for note in target.notes], mark="!", indent=2)


def _charts(report: GateReport) -> Iterator[BarChart]:
    """Each figure as a share of its limit: bytes of a model and of a token have no common scale."""
    bars = [
        Bar(
            f"{target.name}: {_limit_name(check)}",
            (_SHARES * check.figure // max(1, check.allowed),),
            _SHARES,
            size=f"{_figure(check)} of {_amount(check.allowed, check.unit)}",
        )
        for target in report.targets
        for check in target.checks
        if check.unit == "bytes" and check.sense == "at most"
        if isinstance(check.figure, int) and isinstance(check.allowed, int)
    ]
    if bars:
        title = "Figures as shares of their limits"
        yield BarChart(title=title, kinds=("figure",), bars=bars, units=Units.GB, limit="limit")


_SHARES = 10_000
"""Parts of a limit that a bar is drawn in."""


def _check(check: LimitCheck) -> tuple[str | bool, ...]:
    texts = (_limit_name(check), _figure(check), _allowed(check))
    return (*texts, "not decided" if check.undecided_by else check.passed)


def _changes(target: TargetReport) -> Iterator[Text | Table]:
    if not target.changes:
        return
    if all(change.before == change.now for change in target.changes):
        yield Text(["No figure differs from the baseline."], only="page")
        return
    rows = [
        (COMPARED[change.figure], *_amounts(change))
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
            text = f"{_broken(check)}; {_remedy(check)}"
            yield Annotation("error", policy, check.line, title, text)
    for note in target.notes:
        yield Annotation("warning", policy, target.line, title, note.message)


def _cases(target: TargetReport, policy: str) -> Iterator[Case]:
    if target.message is not None:
        yield Case(_STATUSES[target.status][0], policy, target.line, "error", target.message)
    for check in target.checks:
        case = Case(_limit_name(check), policy, check.line)
        if check.undecided_by:
            case = case._replace(outcome="skipped", message="a figure of it is a bound")
        elif not check.passed:
            problem, remedy = _broken(check), _remedy(check)
            case = case._replace(outcome="failure", message=problem, text=remedy)
        yield case


def _headline(report: GateReport) -> str:
    """The verdict in one sentence, with the number of targets."""
    total = len(report.targets)
    targets = "1 target" if total == 1 else f"{total} targets"
    if report.verdict == "passed":
        return f"Gate passed: {targets}"
    counts = [
        f"{count} {text}"
        for status, (text, _) in _STATUSES.items()
        if (count := sum(target.status == status for target in report.targets))
    ]
    return f"Gate not passed: {', '.join(counts)} of {targets}"


def _subject(target: TargetReport) -> str:
    """The model, the machine and the baseline of a target."""
    size = format_bytes(target.working_set_bytes, rounding="nearest", digits=3)
    # A prefix names each other source, and all else is a path.
    source = " (sample)" if target.source == "sample" else ""
    text = f"{target.model}{source} on {name_as_sold(target.device)}, {target.budget} {size}"
    if target.baseline_model and target.baseline_model != target.model:
        text += f"; baseline {target.baseline_model}"
    return text


def _footer(report: GateReport) -> str:
    """The versions of memfit that computed the figures."""
    text = f"memfit {report.memfit_version}, policy {report.policy}"
    if report.baseline_version not in (None, report.memfit_version):
        text += f"; the baseline was written by memfit {report.baseline_version}"
    return text


def _limit_name(check: LimitCheck) -> str:
    implied = IMPLIED.get(check.limit)
    return implied[0] if implied else LIMITS[check.limit].label


def _figure(check: LimitCheck) -> str:
    """The figure of a check with its unit."""
    if check.figure is None:
        return _NO_FIGURE.get(check.unit, "not known")
    return _amount(check.figure, check.unit)


def _at(run: SmallerRun) -> str:
    return f"at batch {run.batch}, {run.prompt_tokens} tokens"


def _allowed(check: LimitCheck) -> str:
    """The allowed amount, and the text of the policy."""
    share = f" ({check.limit_text} of {check.relative_to})" if "%" in check.limit_text else ""
    if check.limit.startswith("growth.") and not share:
        share = f" (+{check.limit_text})"
    return f"{check.sense} {_amount(check.allowed, check.unit)}{share}"


def _broken(check: LimitCheck) -> str:
    """A broken limit in one line: its numbers, and the excess."""
    at = f" {_at(check.peak_of)}" if check.peak_of else ""
    text = f"{_limit_name(check)}: {_figure(check)}{at}, allowed {_allowed(check)}"
    if check.excess is not None:
        word = "too much" if check.sense == "at most" else "too few"
        text += f", {_amount(check.excess, check.unit)} {word}"
    return text


def _remedy(check: LimitCheck) -> str:
    """The changes that would make a broken limit pass, in one line."""
    if implied := IMPLIED.get(check.limit):
        return implied[1]
    if check.limit == "expert_capacity" and check.figure is None:
        return "the model has no routed experts, or only a bound is known: remove the limit"
    if check.limit == "first_token" and check.figure is None:
        return "times are known of one sequence on a known chip: name it as the device"
    if check.limit == "misses_per_token" and not check.remedies:
        return "passes with more experts in memory: memfit plan experts --routing shows how many"
    if check.limit == "restore_peak" and check.figure is None:
        return "it is computed for mlx-lm's caches alone: remove the limit"
    texts = (SETTINGS[each.setting].text.format(each.value) for each in check.remedies)
    text = "passes with " + ", or ".join(texts)
    if not check.remedies:
        tried = ", ".join(SETTINGS[name].tried for name in LIMITS[check.limit].settings)
        text = f"nothing tried alone makes it pass ({tried})"
    if check.limit.startswith("growth."):
        text += "; if the growth is meant, raise the limit or make it the baseline"
    return text


def _amounts(change: FigureChange) -> tuple[str, str, str]:
    """A changed figure: before, now, and the difference with its percent."""
    unit = "bytes" if "bytes" in change.figure else "tokens"
    if change.figure == "expert_capacity":
        unit = "experts"
    before = "-" if change.before is None else _amount(change.before, unit)
    now = "-" if change.now is None else _amount(change.now, unit)
    return before, now, _difference(change, unit)


def _difference(change: FigureChange, unit: str) -> str:
    if change.by is None or change.before is None:
        return "-" if change.before == change.now else "changed"
    if not change.by:
        return "same"
    sign = "+" if change.by > 0 else "-"
    share = f", {sign}{_percent(abs(change.by), change.before)}" if change.before else ""
    return f"{sign}{_amount(abs(change.by), unit)}{share}"


def _percent(part: int, whole: int) -> str:
    # In tenths, rounded up, so that a difference never looks smaller.
    tenths = -(-1000 * part // whole)
    return f"{tenths // 10}.{tenths % 10} %"


def _amount(value: int | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == MISS_UNIT:
        return f"{value // MISSES}.{value % MISSES:03} per token"
    return (
        format_bytes(value, rounding="nearest", digits=3) if unit == "bytes" else f"{value} {unit}"
    )
