"""The gate: every target of a policy answered, judged and compared with its baseline."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from memfit.estimators.base.errors import (
    InputError,
    MemfitError,
    Mistake,
    PolicyError,
    UnreachableError,
    UnsupportedError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.quantization import converted
from memfit.estimators.base.records import record
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.gate import baseline
from memfit.estimators.gate.baseline import Entry, Lock
from memfit.estimators.gate.diff import changes
from memfit.estimators.gate.figures import figures_of
from memfit.estimators.gate.policy import Limit, Policy, Target
from memfit.estimators.gate.remedies import Question, remedies
from memfit.estimators.gate.report import Report, Status, TargetReport, overall
from memfit.estimators.gate.verdict import Check, Reference, judge_limit, judge_limits
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.search import fits_comfortably
from memfit.estimators.sizing.sized_model import SizedModel

# The baseline of a target whose entry of now is given.
Before = Callable[[Target, Entry], Entry | None]


@record(frozen=True, slots=True)
class Outcome:
    """The report, and what a baseline would keep of the targets that have figures."""

    report: Report
    entries: dict[str, Entry]


def select(policy: Policy, names: tuple[str, ...]) -> Policy:
    """Return the policy with the targets of these names only; with all when none is named.

    Raises:
        InputError: when a name is no target's.
    """
    known = [target.name for target in policy.targets]
    for name in names:
        if name not in known:
            raise InputError(
                f"{printable(policy.path)}: no target is called '{printable(name)}'; there is"
                f" {', '.join(known)}"
            )
    chosen = tuple(target for target in policy.targets if not names or target.name in names)
    return replace(policy, targets=chosen)


def run_gate(
    policy: Policy, lock: Lock | None, *, allow_bounds: bool, progress: Progress = NULL_PROGRESS
) -> Outcome:
    """Return the outcome of a policy against its baseline, None when there is no file of it.

    Raises:
        PolicyError: when a target has no model.
    """
    _require_models(policy)
    catalog = Catalog(policy.path.parent, progress)
    kept = lock.targets if lock else {}
    outcome = _run(policy, catalog, None, lambda target, _: kept.get(target.name), allow_bounds)
    version = lock.memfit_version if lock else None
    return replace(outcome, report=replace(outcome.report, baseline_version=version))


def run_update(
    policy: Policy, *, allow_bounds: bool, progress: Progress = NULL_PROGRESS
) -> Outcome:
    """Return the outcome of a policy whose baseline are the figures of now.

    Raises:
        PolicyError: when a target has no model.
    """
    _require_models(policy)
    catalog = Catalog(policy.path.parent, progress)
    return _run(policy, catalog, None, lambda _, now: now, allow_bounds)


def run_between(
    policy: Policy, old: str, new: str, *, allow_bounds: bool, progress: Progress = NULL_PROGRESS
) -> Outcome:
    """Return the outcome for the model ``new`` in every target; the baseline is ``old`` in it."""
    catalog = Catalog(progress=progress)

    def before(target: Target, _: Entry) -> Entry:
        return _Subject(catalog, target, old).entry()

    return _run(policy, catalog, new, before, allow_bounds)


def updated(outcome: Outcome, kept: Lock | None, policy: Policy) -> Lock:
    """Return the baseline of an outcome; ``kept`` gives those of the policy's other targets.

    Raises:
        InputError: when a target has no figures, or only a bound that was not accepted.
    """
    for target in outcome.report.targets:
        if target.status not in ("passed", "broken"):
            raise InputError(f"no baseline is written: {target.name}: {target.message}")
    before = kept.targets if kept else {}
    others = {t.name: before[t.name] for t in policy.targets if t.name in before}
    return Lock(__version__, {**others, **outcome.entries})


def _run(
    policy: Policy, catalog: Catalog, model: str | None, before: Before, allow_bounds: bool
) -> Outcome:
    reports, entries = [], {}
    for target in policy.targets:
        reference = model if model is not None else target.model or ""
        try:
            subject = _Subject(catalog, target, reference)
            now = subject.entry()
            entries[target.name] = now
            answer = _Answer(subject, now, before(target, now))
            reports.append(answer.report(allow_bounds))
        except MemfitError as error:
            reports.append(_without_figures(target, reference, error))
    found = tuple(reports)
    report = Report(
        memfit_version=__version__,
        policy=printable(policy.path),
        baseline_version=None,
        verdict=overall(found),
        targets=found,
    )
    return Outcome(report, entries)


def _require_models(policy: Policy) -> None:
    text = "name a model, or give OLD and NEW"
    mistakes = [
        Mistake(printable(policy.path), target.line, f"targets.{target.name}", text)
        for target in policy.targets
        if target.model is None
    ]
    if mistakes:
        raise PolicyError(mistakes)


@record(frozen=True, slots=True)
class _Subject:
    """A model in a target's place."""

    catalog: Catalog
    target: Target
    model: str

    @property
    def runtime(self) -> Runtime:
        """The target's runtime, else the native one of the checkpoint."""
        return self.target.runtime or self.catalog.native_runtime(self.model)

    @property
    def workload(self) -> Workload:
        """The target's workload with the runtime's defaults."""
        return self.target.workload.under(self.runtime)

    def sized(self, quantize: int | None) -> SizedModel:
        """Return the model as it is, or converted to so many bits."""
        return self.catalog.sized(
            self.model,
            quantize=converted(quantize) if quantize else None,
            device=self.target.device,
            runtime=self.target.runtime,
        )

    def entry(self) -> Entry:
        """Return the figures that a baseline keeps."""
        target, workload = self.target, self.workload
        sized = self.sized(target.quantize)
        return Entry(
            model=self.model,
            quantize=target.quantize,
            model_type=sized.model.model_type,
            asked=baseline.asked(target.device, self.runtime, workload),
            checkpoint=baseline.fingerprint(sized.checkpoint),
            figures=figures_of(sized, workload),
        )


def _without_figures(target: Target, model: str, error: MemfitError) -> TargetReport:
    status: Status = "invalid"
    if isinstance(error, UnsupportedError):
        status = "undecided"
    elif isinstance(error, UnreachableError):
        status = "unreachable"
    return TargetReport(
        name=target.name,
        line=target.line,
        model=model,
        device=target.device.name,
        working_set_bytes=target.device.working_set_bytes,
        status=status,
        message=str(error),
    )


@record(frozen=True, slots=True)
class _Answer:
    """One target with its figures of now and before."""

    subject: _Subject
    now: Entry
    before: Entry | None

    @property
    def target(self) -> Target:
        """The target of the policy."""
        return self.subject.target

    @property
    def sized(self) -> SizedModel:
        """The model as the target has it."""
        return self.subject.sized(self.target.quantize)

    def report(self, allow_bounds: bool) -> TargetReport:
        """Return the target's report.

        Raises:
            InputError: when a limit on growth has no baseline, or one of another question.
        """
        target = self.target
        self._require_baseline()
        figures, before = self.now.figures, self.before
        checks = tuple(
            check if check.passed else self._mended(check)
            for check in judge_limits(target.limits, target.basis, figures, self._reference)
        )
        status: Status = "passed" if all(check.passed for check in checks) else "broken"
        bound = None if allow_bounds else self._bound()
        return TargetReport(
            name=target.name,
            line=target.line,
            model=self.now.model,
            device=target.device.name,
            working_set_bytes=target.device.working_set_bytes,
            status="undecided" if bound else status,
            message=bound,
            checks=checks,
            figures=figures,
            baseline_model=before.model if before else None,
            changes=tuple(changes(before.figures, figures)) if before else (),
            notes=tuple(self._notes()),
        )

    @property
    def _reference(self) -> Reference:
        before = self.before.figures if self.before else None
        return Reference(self.target.device.working_set_bytes, before)

    def _require_baseline(self) -> None:
        if not self.target.needs_baseline:
            return
        if self.before is None:
            raise InputError(
                f"no baseline to grow from; memfit gate --update writes {baseline.NAME}"
            )
        if different := self._asked_differently():
            raise InputError(
                f"the baseline answers another question ({different});"
                " memfit gate --update makes a new one"
            )

    def _asked_differently(self) -> str:
        before = self.before.asked if self.before else self.now.asked
        return "; ".join(baseline.differences(before, self.now.asked))

    def _bound(self) -> str | None:
        """Why the figures do not decide, where they are bounds."""
        basis = self.target.basis
        if basis and basis.least == "bound":
            return None
        # A basis the policy asks for is judged as a limit; of the baseline it says nothing.
        now = None if basis else self.now
        before = self.before if self.target.needs_baseline else None
        for name, entry in (("the weights", now), ("the baseline's weights", before)):
            if entry and entry.figures.basis == "bound":
                reason = next((n.message for n in self.sized.footprint.notes), entry.model)
                return f"{name} are a bound ({reason}); --allow-bounds accepts it"
        return None

    def _notes(self) -> Iterator[Note]:
        before = self.before
        if before and before.model == self.now.model:
            parts = baseline.replaced(before.checkpoint, self.now.checkpoint)
            if parts:
                text = f"{self.now.model} was replaced behind its name: {', '.join(parts)}"
                yield Note("warning", "checkpoint-changed", text)
        if different := self._asked_differently():
            yield Note("warning", "other-question", f"the baseline is of {different}")
        for note in self.sized.footprint.notes:
            if note.level == "warning":
                yield note
        for warning in self.sized.checkpoint.warnings:
            yield Note("warning", "checkpoint", warning)

    def _mended(self, check: Check) -> Check:
        limit = next((one for one in self.target.limits if one.name == check.limit), None)
        if limit is None:
            return check
        footprint = self.sized.footprint
        found = remedies(
            limit.name,
            Question(self.subject.workload, self.target.quantize),
            ceil_div(8 * footprint.nbytes, footprint.parameters),
            lambda question: self._passes(limit, question),
        )
        return replace(check, mends=tuple(found))

    def _passes(self, limit: Limit, question: Question) -> bool:
        sized = self.subject.sized(question.quantize)
        is_context = limit.name == "context"
        if is_context:
            prompt = question.workload.prompt_only(limit.amount.numerator)
            if not fits_comfortably(sized, prompt):
                return False  # one evaluation in place of a search
        figures = figures_of(sized, question.workload, with_context=is_context)
        return judge_limit(limit, figures, self._reference).passed
