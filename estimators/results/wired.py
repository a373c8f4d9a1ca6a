"""A plan of wired memory as data: renderers show it and compute nothing."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.estimators.base.units import Bytes, Count, NonEmpty, Positive, one_of
from memfit.estimators.machine.device import Backend
from memfit.estimators.results.result import Result

TicketKind = Literal["active", "reservation"]
TicketOutcome = Literal["admitted", "refused", "gave_up", "waiting", "left_out"]
PolicyKind = Annotated[str, one_of("sum", "max", "baseline-max", "fixed", "budget", "speculative")]
WiredMode = Literal["wired", "policy-only"]
WiredVerdict = Literal["holds", "waits", "fails"]


class TicketPlan(Struct, frozen=True):
    """What happens to one ticket; times are milliseconds from the start of the scenario."""

    name: str
    policy: str
    kind: TicketKind
    size_bytes: Bytes
    asked_ms: Count
    waited_ms: Count
    """For a ticket that gave up, until then; for one that still waits, until the end."""
    started_ms: Count | None
    ended_ms: Count | None
    outcome: TicketOutcome
    """``waiting``: never admitted; ``left_out``: a draft model that is not loaded."""
    reason: str | None
    source: str | None
    """Where the size comes from: a measurement or an estimate; None when it was given."""


class WiredMoment(Struct, frozen=True):
    """The state after all events of one time; counts are of tickets."""

    at_ms: Count
    limit_bytes: Bytes
    """The limit that is set: hysteresis keeps it higher, a refusal by MLX lower than wanted."""
    wanted_bytes: Bytes
    """The limit the policies request."""
    demand_bytes: Bytes
    """Bytes of all tickets that started."""
    waiting_bytes: Bytes
    active: Count
    reserved: Count
    waiting: Count


class WiredMachine(Struct, frozen=True):
    """The machine of a plan, in bytes."""

    name: str
    backend: Backend
    memory_bytes: Positive
    working_set_bytes: Positive


class WiredPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-wired/1"):
    """The result of ``memfit plan wired``."""

    scenario: str
    device: WiredMachine | None
    mode: WiredMode
    shrink_threshold_percent: Annotated[float, Meta(ge=0, le=100)]
    shrink_cooldown_ms: Count
    baseline_bytes: Bytes
    policies: Annotated[dict[str, PolicyKind], Meta(min_length=1)]
    """The kind of each policy, by its name."""
    verdict: WiredVerdict
    """``fails`` when a ticket is refused or never admitted, or when MLX refuses a limit."""
    largest_limit_bytes: Bytes
    largest_limit_at_ms: Count
    largest_demand_bytes: Bytes
    longest_wait_ms: Count
    refused_limits: Count
    refused_changes_ms: tuple[Count, ...]
    """When the configuration was to change while a ticket ran or waited."""
    sysctl_mebibytes: Count | None
    """``iogpu.wired_limit_mb`` for the largest limit; None when the default is enough, or when no
    value is."""
    left_for_system_bytes: Bytes | None
    tickets: NonEmpty[TicketPlan]
    moments: NonEmpty[WiredMoment]
    notes: tuple[str, ...]
