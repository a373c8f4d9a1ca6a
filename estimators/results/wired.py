"""A plan of wired memory as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-wired.schema.json.
"""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.version import __version__

SCHEMA = "memfit.plan-wired/1"
TicketKind = Literal["active", "reservation"]
TicketOutcome = Literal["admitted", "refused", "gave_up", "waiting", "left_out"]
WiredVerdict = Literal["holds", "waits", "fails"]


class TicketPlan(Struct, frozen=True):
    """What happens to one ticket; times are milliseconds from the start of the scenario."""

    name: str
    policy: str
    kind: TicketKind
    size_bytes: int
    asked_ms: int
    waited_ms: int
    """For a ticket that gave up, until then; for one that still waits, until the end."""
    started_ms: int | None
    ended_ms: int | None
    outcome: TicketOutcome
    """``waiting``: never admitted; ``left_out``: a draft model that is not loaded."""
    reason: str | None


class WiredMoment(Struct, frozen=True):
    """The state after all events of one time; counts are of tickets."""

    at_ms: int
    limit_bytes: int
    """The limit that is set: hysteresis keeps it higher, a refusal by MLX lower than wanted."""
    wanted_bytes: int
    """The limit the policies request."""
    demand_bytes: int
    """Bytes of all tickets that started."""
    waiting_bytes: int
    active: int
    reserved: int
    waiting: int


class WiredMachine(Struct, frozen=True):
    """The machine of a plan, in bytes."""

    name: str
    backend: str
    memory_bytes: int
    working_set_bytes: int


class WiredPlan(Struct, frozen=True):
    """The result of ``memfit plan wired``."""

    scenario: str
    device: WiredMachine | None
    mode: str
    shrink_threshold_percent: float
    shrink_cooldown_ms: int
    baseline_bytes: int
    policies: dict[str, str]
    verdict: WiredVerdict
    """``fails`` when a ticket is refused or never admitted, or when MLX refuses a limit."""
    largest_limit_bytes: int
    largest_limit_at_ms: int
    largest_demand_bytes: int
    longest_wait_ms: int
    refused_limits: int
    sysctl_mebibytes: int | None
    """``iogpu.wired_limit_mb`` for the largest limit; None when the default is enough, or when no
    value is."""
    left_for_system_bytes: int | None
    tickets: tuple[TicketPlan, ...]
    moments: tuple[WiredMoment, ...]
    notes: tuple[str, ...]
    schema: str = SCHEMA
    memfit_version: str = __version__
