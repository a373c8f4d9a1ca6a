"""The gate: the figures of every target of a policy, its limits and its baseline."""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import (
    InputError,
    MachineError,
    MemfitError,
    Mistake,
    PolicyError,
    UnreachableError,
    UnsupportedError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.gate.baseline import Baseline, BaselineEntry
from memfit.estimators.gate.policy import Policy, PolicyTarget
from memfit.estimators.gate.report import GateReport, TargetReport, TargetStatus, worst
from memfit.estimators.gate.target import SizedTarget, report_of, size_target
from memfit.estimators.sizing.catalog import Catalog


class Outcome(Struct, frozen=True):
    """The report, and the baseline that could be made of it."""

    report: GateReport
    entries: dict[str, BaselineEntry]
    """Of the targets that have figures."""


def select(policy: Policy, names: tuple[str, ...]) -> Policy:
    """Return the policy with only the targets of these names, with all of them without names.

    Raises:
        InputError: when there is no target of a name.
    """
    known = [target.name for target in policy.targets]
    for name in names:
        if name not in known:
            raise InputError(
                f"{printable(policy.path)}: unknown target '{printable(name)}'; there is"
                f" {', '.join(known)}"
            )
    chosen = tuple(target for target in policy.targets if not names or target.name in names)
    return replace(policy, targets=chosen)


def run_gate(
    policy: Policy,
    baseline: Baseline | None,
    *,
    allow_bounds: bool,
    is_update: bool = False,
    progress: Progress = NULL_PROGRESS,
) -> Outcome:
    """Return the outcome of a policy; ``baseline`` is None when there is no such file.

    Where it ``is_update``, the present figures are the baseline.

    Raises:
        PolicyError: when a target has no model.
    """
    text = "name a model, or give OLD and NEW"
    mistakes = [
        Mistake(printable(policy.path), target.line, f"targets.{target.name}", text)
        for target in policy.targets
        if not target.question.reference
    ]
    if mistakes:
        raise PolicyError(mistakes)
    entries = baseline.targets if baseline else {}

    def before(present: SizedTarget) -> BaselineEntry | None:
        return present.now if is_update else entries.get(present.target.name)

    catalog = Catalog(policy.path.parent, progress, guess_hub=False)
    outcome = _run(policy, catalog, before, allow_bounds)
    version = baseline.memfit_version if baseline and not is_update else None
    return replace(outcome, report=replace(outcome.report, baseline_version=version))


def run_between(
    policy: Policy, old: str, new: str, *, allow_bounds: bool, progress: Progress = NULL_PROGRESS
) -> Outcome:
    """Return the outcome for ``new`` as the model of every target; the baseline is of ``old``."""
    catalog = Catalog(progress=progress, guess_hub=False)
    targets = tuple(_of_model(target, new) for target in policy.targets)

    def before(present: SizedTarget) -> BaselineEntry:
        return size_target(catalog, _of_model(present.target, old)).now

    return _run(replace(policy, targets=targets), catalog, before, allow_bounds)


def _of_model(target: PolicyTarget, reference: str) -> PolicyTarget:
    return replace(target, question=replace(target.question, reference=reference))


def updated(outcome: Outcome, old: Baseline | None, policy: Policy) -> Baseline:
    """Return the baseline of an outcome; the policy's other targets stay as in ``old``.

    Raises:
        InputError: when a target has no figures, or only a bound that was not accepted.
    """
    for target in outcome.report.targets:
        if target.message is not None:
            raise InputError(f"no baseline is written: {target.name}: {target.message}")
    before = old.targets if old else {}
    others = {t.name: before[t.name] for t in policy.targets if t.name in before}
    return Baseline(targets={**others, **outcome.entries})


def _run(
    policy: Policy,
    catalog: Catalog,
    before: Callable[[SizedTarget], BaselineEntry | None],
    allow_bounds: bool,
) -> Outcome:
    reports, entries = [], {}
    for target in policy.targets:
        try:
            present = size_target(catalog, target)
            entries[target.name] = present.now
            reports.append(report_of(catalog, present, before(present), allow_bounds=allow_bounds))
        except MemfitError as error:
            reports.append(_without_figures(target, error))
    report = GateReport(
        policy=printable(policy.path),
        baseline_version=None,
        verdict=worst(reports),
        targets=tuple(reports),
    )
    return Outcome(report, entries)


def _without_figures(target: PolicyTarget, error: MemfitError) -> TargetReport:
    status: TargetStatus = "invalid"
    if isinstance(error, (UnsupportedError, MachineError)):
        status = "undecided"
    elif isinstance(error, UnreachableError):
        status = "unreachable"
    return TargetReport(
        name=target.name,
        line=target.line,
        model=target.question.reference,
        device=target.device.name,
        working_set_bytes=target.device.working_set_bytes,
        status=status,
        message=str(error),
    )
