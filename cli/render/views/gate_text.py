"""Texts for a gate's report, shared by every format that people read."""

from memfit.estimators.base.units import format_bytes
from memfit.estimators.gate.figures import COMPARED, FigureChange, GateFigures, SmallerRun
from memfit.estimators.gate.limits import IMPLIED, LIMITS, LimitCheck
from memfit.estimators.gate.remedies import SETTINGS
from memfit.estimators.gate.report import GateReport, TargetReport, TargetStatus

_STATUSES: dict[TargetStatus, str] = {
    "passed": "passed",
    "broken": "beyond its limits",
    "invalid": "invalid input",
    "undecided": "not decided",
    "unreachable": "not reachable",
}


def headline(report: GateReport) -> str:
    """The verdict in one sentence, with the number of targets."""
    total = len(report.targets)
    targets = "1 target" if total == 1 else f"{total} targets"
    if report.verdict == "passed":
        return f"Gate passed: {targets}"
    counts = [
        f"{count} {_STATUSES[status]}"
        for status in _STATUSES
        if (count := sum(target.status == status for target in report.targets))
    ]
    return f"Gate not passed: {', '.join(counts)} of {targets}"


def status(target: TargetReport) -> str:
    return _STATUSES[target.status]


def subject(target: TargetReport) -> str:
    """The model, the machine and the baseline of a target."""
    size = format_bytes(target.working_set_bytes)
    # A prefix names each other source, and all else is a path.
    source = " (sample)" if target.source == "sample" else ""
    text = f"{target.model}{source} on {target.device}, {target.budget} {size}"
    if target.baseline_model and target.baseline_model != target.model:
        text += f"; baseline {target.baseline_model}"
    return text


def footer(report: GateReport) -> str:
    """The versions of memfit that computed the figures."""
    text = f"memfit {report.memfit_version}, policy {report.policy}"
    if report.baseline_version not in (None, report.memfit_version):
        text += f"; the baseline was written by memfit {report.baseline_version}"
    return text


def limit_name(check: LimitCheck) -> str:
    rule = LIMITS.get(check.limit)
    return rule.label if rule else IMPLIED[check.limit]


def figure_name(change: FigureChange) -> str:
    return COMPARED[change.figure]


def figure(check: LimitCheck) -> str:
    """The figure of a check with its unit."""
    if check.figure is None:
        return "none fits" if check.unit == "tokens" else "no experts"
    return _amount(check.figure, check.unit)


def _at(run: SmallerRun) -> str:
    return f"at batch {run.batch}, {run.prompt_tokens} tokens"


def smaller_run(figures: GateFigures | None) -> str | None:
    """What a target's peak is of, where a smaller workload takes more than its own."""
    if figures is None or not figures.peak_of:
        return None
    return f"the peak is {_at(figures.peak_of)}: that takes more than the target's workload"


def allowed(check: LimitCheck) -> str:
    """The allowed amount, and the text of the policy."""
    share = f" ({check.limit_text} of {check.relative_to})" if "%" in check.limit_text else ""
    if check.limit.startswith("growth.") and not share:
        share = f" (+{check.limit_text})"
    return f"{check.sense} {_amount(check.allowed, check.unit)}{share}"


def broken(check: LimitCheck) -> str:
    """A broken limit in one line: its numbers, and the excess."""
    at = f" {_at(check.peak_of)}" if check.peak_of else ""
    text = f"{limit_name(check)}: {figure(check)}{at}, allowed {allowed(check)}"
    if check.excess is not None:
        word = "too much" if check.sense == "at most" else "too few"
        text += f", {_amount(check.excess, check.unit)} {word}"
    return text


def remedy(check: LimitCheck) -> str:
    """The changes that would make a broken limit pass, in one line."""
    if check.limit == "basis":
        return "give a checkpoint with shard headers that can be read"
    if check.limit == "model_context":
        return "the model has no longer context; allow_beyond_context: true in the target allows it"
    if check.limit in ("runtime_budget", "memory", "host_memory"):
        return "it does not run the workload; shorter prompts or fewer requests take less"
    if check.limit == "expert_capacity" and check.figure is None:
        return "the model has no routed experts, or only a bound is known: remove the limit"
    texts = (SETTINGS[each.setting].text.format(each.value) for each in check.remedies)
    text = "passes with " + ", or ".join(texts)
    if not check.remedies:
        tried = ", ".join(SETTINGS[name].tried for name in LIMITS[check.limit].settings)
        text = f"nothing tried alone makes it pass ({tried})"
    if check.limit.startswith("growth."):
        text += "; if the growth is meant, raise the limit or make it the baseline"
    return text


def amounts(change: FigureChange) -> tuple[str, str, str]:
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
    return format_bytes(value) if unit == "bytes" else f"{value} {unit}"
