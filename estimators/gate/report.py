"""What a gate reports, as data: renderers show it and compute nothing."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from memfit.estimators.base.units import NonEmpty, Positive
from memfit.estimators.gate.figures import FigureChange, GateFigures
from memfit.estimators.gate.limits import LimitCheck
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Source

# broken: a limit does not hold. invalid: the input must be corrected before anything can be said.
# undecided: no figure, or only a bound. unreachable: a source did not answer.
TargetStatus = Literal["passed", "broken", "invalid", "unreachable", "undecided"]
# A broken limit decides whatever the other targets say; then comes what the user can correct, what
# may pass on another try, and what memfit does not know.
_WORST_FIRST: tuple[TargetStatus, ...] = ("broken", "invalid", "unreachable", "undecided", "passed")


class TargetReport(Struct, frozen=True, kw_only=True):
    """One target of a policy."""

    name: str
    line: Positive
    model: str
    device: str
    working_set_bytes: Positive
    budget: str = "working set"
    """Name of that memory, where the runtime may take another part of the machine."""
    status: TargetStatus
    message: str | None = None
    """Reason why there are no checks, or why some do not decide."""
    checks: tuple[LimitCheck, ...] = ()
    figures: GateFigures | None = None
    baseline_model: str | None = None
    changes: tuple[FigureChange, ...] = ()
    notes: tuple[Note, ...] = ()
    source: Source | None = None
    """Place where the model was read; None where it could not be."""


class GateReport(Result, frozen=True, kw_only=True, tag="memfit.gate/2"):
    """All targets that were checked, in the order of the policy; there is at least one."""

    policy: str
    baseline_version: str | None
    """Version of memfit that wrote the baseline, None when there is no such file."""
    verdict: TargetStatus
    targets: NonEmpty[TargetReport]


def worst(targets: Iterable[TargetReport]) -> TargetStatus:
    """Return the worst status of targets, of which there is at least one."""
    statuses = {target.status for target in targets}
    return next(status for status in _WORST_FIRST if status in statuses)
