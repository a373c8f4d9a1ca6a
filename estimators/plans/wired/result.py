"""What a plan of wired memory says, as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-wired.schema.json.
"""

from collections.abc import Sequence
from typing import Literal

from memfit.estimators.base.records import record
from memfit.estimators.base.version import __version__
from memfit.estimators.plans.wired.ledger import TicketKind

SCHEMA = "memfit.plan-wired/1"
Outcome = Literal["admitted", "refused", "gave_up", "waiting", "left_out"]
Verdict = Literal["holds", "waits", "fails"]


@record(frozen=True, slots=True)
class TicketPlan:
    """What becomes of one ticket; times are milliseconds from the scenario's beginning.

    ``waiting`` is one that is never admitted; ``left_out`` a draft model that is done without.
    ``waited_ms`` of one that gave up or waits on counts to its end or the scenario's.
    """

    name: str
    policy: str
    kind: TicketKind
    size_bytes: int
    asked_ms: int
    waited_ms: int
    started_ms: int | None
    ended_ms: int | None
    outcome: Outcome
    reason: str | None


@record(frozen=True, slots=True)
class Moment:
    """The state after everything that happens at one time has happened.

    ``wanted_bytes`` is what the policies ask for, ``limit_bytes`` what is set: hysteresis keeps
    it higher, a refusal by MLX lower. ``demand_bytes`` is held by all tickets that started, those
    that wait ask for ``waiting_bytes`` more; the counts are of tickets.
    """

    at_ms: int
    limit_bytes: int
    wanted_bytes: int
    demand_bytes: int
    waiting_bytes: int
    active: int
    reserved: int
    waiting: int


@record(frozen=True, slots=True)
class WiredMachine:
    """The machine of a plan, in bytes."""

    name: str
    backend: str
    memory_bytes: int
    working_set_bytes: int


@record(frozen=True, slots=True)
class WiredPlan:
    """The answer; ``fails`` when a ticket is refused or never admitted, or MLX refuses a limit.

    ``sysctl_mebibytes`` is what ``iogpu.wired_limit_mb`` must be for the largest limit, null when
    stock is enough or no setting would be.
    """

    scenario: str
    device: WiredMachine | None
    mode: str
    shrink_threshold_percent: float
    shrink_cooldown_ms: int
    baseline_bytes: int
    policies: dict[str, str]
    verdict: Verdict
    largest_limit_bytes: int
    largest_limit_at_ms: int
    largest_demand_bytes: int
    longest_wait_ms: int
    refused_limits: int
    sysctl_mebibytes: int | None
    left_for_system_bytes: int | None
    tickets: tuple[TicketPlan, ...]
    moments: tuple[Moment, ...]
    notes: tuple[str, ...]
    schema: str = SCHEMA
    memfit_version: str = __version__


def thinned(moments: Sequence[Moment], most: int) -> tuple[Moment, ...]:
    """Return at most ``most`` moments: of each equal span of time the one with the most demand.

    Held and waiting bytes both count, so that no peak of either is left out of a plot.
    """
    if len(moments) <= most:
        return tuple(moments)
    first, last = moments[0].at_ms, moments[-1].at_ms
    spans: dict[int, Moment] = {}
    for moment in moments:
        span = (moment.at_ms - first) * most // (last - first + 1)
        kept = spans.get(span)
        if kept is None or _asked(moment) > _asked(kept):
            spans[span] = moment
    return tuple(spans.values())


def _asked(moment: Moment) -> int:
    return moment.demand_bytes + moment.waiting_bytes
