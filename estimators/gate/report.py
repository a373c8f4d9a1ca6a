"""What a gate found, as data: renderers show it and compute nothing.

The fields mirror the JSON of ``memfit gate --format json`` (docs/schema/gate.schema.json).
"""

from typing import Literal

from memfit.estimators.base.records import record
from memfit.estimators.gate.diff import Change
from memfit.estimators.gate.figures import Figures
from memfit.estimators.gate.verdict import Check
from memfit.estimators.results.estimate import Note

SCHEMA = "memfit.gate/1"

# broken: a limit does not hold. invalid: the input must be mended before anything can be said.
# undecided: no figure, or only a bound. unreachable: a source did not answer.
Status = Literal["passed", "broken", "invalid", "unreachable", "undecided"]

# A broken limit settles the matter whatever the other targets say; then comes what the user can
# mend, what may pass by itself, and what memfit does not know.
_GRAVEST_FIRST: tuple[Status, ...] = ("broken", "invalid", "unreachable", "undecided", "passed")


@record(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """One target: its checks, or the ``message`` why there are none."""

    name: str
    line: int
    model: str
    device: str
    working_set_bytes: int
    status: Status
    message: str | None = None
    checks: tuple[Check, ...] = ()
    figures: Figures | None = None
    baseline_model: str | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[Note, ...] = ()


@record(frozen=True, slots=True, kw_only=True)
class Report:
    """All targets that were looked at, in the order of the policy; there is at least one.

    ``baseline_version`` is the memfit that wrote the baseline, None where there is no file of it.
    """

    memfit_version: str
    policy: str
    baseline_version: str | None
    verdict: Status
    targets: tuple[TargetReport, ...]
    schema: str = SCHEMA


def overall(targets: tuple[TargetReport, ...]) -> Status:
    """Return the gravest status."""
    found = {target.status for target in targets}
    return next(status for status in _GRAVEST_FIRST if status in found)
