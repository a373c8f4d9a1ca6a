"""Tickets for wired memory, and the limit that follows from them: a state machine without a clock.

The rules are those of mlx-swift's WiredMemoryManager (Source/MLX/WiredMemory.swift); docs/wired.md
lists the differences. The caller passes the time to each call, so that a server's manager and a
simulated plan run the same code.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Literal, Protocol
from uuid import uuid4

from msgspec import Struct, field

from memfit.estimators.base.errors import InputError
from memfit.estimators.guard.policies import WiredPolicy
from memfit.estimators.results.wired import TicketKind

Admission = Literal["started", "waiting", "refused"]
EventKind = Literal["started", "waiting", "refused", "cancelled", "ended", "limit", "limit_refused"]


class Ticket(Struct, frozen=True):
    """A request for ``size`` bytes of wired memory."""

    policy: WiredPolicy
    size: int
    kind: TicketKind = "active"
    """A reservation counts towards the limit, but does not raise it without active tickets."""
    name: str = field(default_factory=lambda: uuid4().hex)
    may_start: Callable[[], bool] | None = None
    """Decides beside its policy whether it starts now: a guard, for the request of the ticket."""

    def __post_init__(self) -> None:
        """Reject a negative size."""
        if self.size < 0:
            raise InputError(f"ticket {self.name}: a size of {self.size} bytes is negative")


class WiredSettings(Struct, frozen=True):
    """How the limit moves."""

    shrink_threshold: Fraction = Fraction(1, 4)
    """While tickets are active, the limit shrinks only by this share of itself or more."""
    shrink_cooldown_ms: int = 1000
    """While tickets are active, the limit shrinks no sooner than this after its last change."""
    policy_only: bool = True
    """Keep admission when no limit can be set; otherwise every ticket then starts at once."""
    baseline_override: int | None = None

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if not 0 <= self.shrink_threshold <= 1:
            raise InputError(f"shrink threshold {self.shrink_threshold}: give a share of 0 to 1")
        if self.shrink_cooldown_ms < 0:
            raise InputError(f"shrink cooldown of {self.shrink_cooldown_ms} ms is negative")
        if self.baseline_override is not None and self.baseline_override < 0:
            raise InputError(f"baseline of {self.baseline_override} bytes is negative")


class WiredBackend(Protocol):
    """The machine: whether it has a limit, and how to set it."""

    @property
    def supported(self) -> bool:
        """Whether there is a limit to set."""

    @property
    def recommended_bytes(self) -> int | None:
        """The recommended working set, None when there is none."""

    def apply(self, limit: int) -> bool:
        """Set the limit; return whether it was accepted."""


class SimulatedBackend(Struct, frozen=True):
    """A machine known only by its figures: it accepts what MLX would accept there."""

    supported: bool
    recommended_bytes: int | None = None

    def apply(self, limit: int) -> bool:
        """Return whether MLX accepts the limit: up to the working set (allocator.cpp)."""
        return self.recommended_bytes is None or limit <= self.recommended_bytes


class WiredEvent(Struct, frozen=True):
    """Something that happened to a ticket, or to the limit (``limit_bytes``)."""

    at_ms: int
    kind: EventKind
    ticket: str | None = None
    limit_bytes: int | None = None


def ignore_event(event: WiredEvent) -> None:
    """Do nothing with an event."""


class WiredLedger:
    """The tickets that started, the tickets that wait, and the resulting limit."""

    def __init__(
        self,
        backend: WiredBackend,
        settings: WiredSettings | None = None,
        observe: Callable[[WiredEvent], None] = ignore_event,
    ) -> None:
        """Start without tickets; ``observe`` is called with every event, in order."""
        self.settings = settings or WiredSettings()
        self._backend, self._observe = backend, observe
        self._live: dict[str, Ticket] = {}
        self._queue: dict[str, Ticket] = {}
        self._policies: dict[WiredPolicy, WiredPolicy] = {}
        self._baseline: int | None = None
        self._limit: int | None = None
        self._changed_ms: int | None = None

    @property
    def baseline_bytes(self) -> int:
        """The limit without active tickets: as set, last applied, recommended, or 0."""
        return self._resolved_baseline() if self._baseline is None else self._baseline

    @property
    def limit_bytes(self) -> int:
        """The limit that is applied now."""
        return self.baseline_bytes if self._limit is None else self._limit

    @property
    def wanted_bytes(self) -> int:
        """The limit that the policies request now: the largest of all groups."""
        if not self._has_active_work():
            return self.baseline_bytes
        return max(
            policy.limit(self.baseline_bytes, self._sizes(policy), self._backend.recommended_bytes)
            for policy in self._policies.values()
        )

    @property
    def held(self) -> tuple[Ticket, ...]:
        """The tickets that have started and not ended."""
        return tuple(self._live.values())

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """The tickets that wait, in order of arrival."""
        return tuple(self._queue.values())

    def configure(self, settings: WiredSettings) -> None:
        """Replace the settings, which hold from the next ticket on; reservations may be held.

        Raises:
            InputError: while a ticket runs or waits; there mlx-swift's updateConfiguration ends the
                program.
        """
        if self._has_active_work() or self._queue:
            raise InputError("the configuration cannot change while a ticket runs or waits")
        self.settings = settings

    def request(self, ticket: Ticket, now_ms: int) -> Admission:
        """Start a ticket, or let it wait behind the waiting tickets of its group.

        A ticket is refused when its group would not admit it even alone. A ticket that has
        started is left as it is.

        Raises:
            InputError: when a ticket of that name waits already.
        """
        if ticket.name in self._queue:
            raise InputError(f"ticket {ticket.name} waits already; end or cancel it first")
        if ticket.name in self._live or not self._admission_applies():
            return "started"
        if self._baseline is None or not self._has_active_work():
            self._baseline = self._resolved_baseline()
        if not self._admits(ticket, ()):
            self._emit(now_ms, "refused", ticket.name)
            return "refused"
        self._queue[ticket.name] = ticket
        if ticket in self._admit(now_ms):
            self._settle(now_ms)
            return "started"
        self._emit(now_ms, "waiting", ticket.name)
        return "waiting"

    def end(self, name: str, now_ms: int) -> tuple[Ticket, ...]:
        """Remove a ticket and return those that start in its place; ignore an unknown name."""
        if name in self._queue:
            return self.cancel(name, now_ms)
        ticket = self._live.pop(name, None)
        if ticket is None:
            return ()
        self._emit(now_ms, "ended", name)
        if not self._sizes(ticket.policy):
            del self._policies[ticket.policy]
        return self._after_removal(now_ms)

    def cancel(self, name: str, now_ms: int) -> tuple[Ticket, ...]:
        """Remove a waiting ticket and return the tickets behind it that start now."""
        if self._queue.pop(name, None) is None:
            return ()
        self._emit(now_ms, "cancelled", name)
        return self._after_removal(now_ms)

    def retry(self, now_ms: int) -> tuple[Ticket, ...]:
        """Return the waiting tickets that start now; what they wait for can change by itself."""
        return self._after_removal(now_ms) if self._queue else ()

    def _after_removal(self, now_ms: int) -> tuple[Ticket, ...]:
        admitted = tuple(self._admit(now_ms))
        # Once, after the next tickets have started: the limit does not dip in between.
        self._settle(now_ms)
        return admitted

    def _admit(self, now_ms: int) -> list[Ticket]:
        """Start the waiting tickets that fit, in order.

        A ticket that has to wait for active tickets blocks the rest of its group. A ticket that
        has to wait for a reservation blocks nothing: a reservation of weights may last for days.
        """
        admitted: list[Ticket] = []
        blocked: set[WiredPolicy] = set()
        for ticket in tuple(self._queue.values()):
            if ticket.policy in blocked:
                continue
            fits = self._admits(ticket, self._sizes(ticket.policy))
            if fits and (ticket.may_start is None or ticket.may_start()):
                del self._queue[ticket.name]
                self._live[ticket.name] = ticket
                # The latest of equal policies decides for the group, as in mlx-swift.
                self._policies.pop(ticket.policy, None)
                self._policies[ticket.policy] = ticket.policy
                self._emit(now_ms, "started", ticket.name)
                admitted.append(ticket)
            elif self._admits(ticket, self._sizes(ticket.policy, only="reservation")):
                blocked.add(ticket.policy)
        return admitted

    def _settle(self, now_ms: int) -> None:
        """Set the wanted limit, unless hysteresis delays it."""
        wanted = self.wanted_bytes
        if wanted == self._limit or self._is_delayed(wanted, now_ms):
            return
        if self._backend.supported and not self._backend.apply(wanted):
            self._emit(now_ms, "limit_refused", limit_bytes=wanted)
            return
        self._limit, self._changed_ms = wanted, now_ms
        self._emit(now_ms, "limit", limit_bytes=wanted)

    def _is_delayed(self, wanted: int, now_ms: int) -> bool:
        if self._limit is None or wanted >= self._limit or not self._has_active_work():
            return False
        if self._limit - wanted < self.settings.shrink_threshold * self._limit:
            return True
        changed = self._changed_ms
        return changed is not None and now_ms - changed < self.settings.shrink_cooldown_ms

    def _resolved_baseline(self) -> int:
        if self.settings.baseline_override is not None:
            return self.settings.baseline_override
        if self._limit is not None:
            return self._limit
        return 0 if self._backend.supported else self._backend.recommended_bytes or 0

    def _admits(self, ticket: Ticket, sizes: tuple[int, ...]) -> bool:
        recommended = self._backend.recommended_bytes
        return ticket.policy.admits(self.baseline_bytes, sizes, ticket.size, recommended)

    def _sizes(self, policy: WiredPolicy, only: TicketKind | None = None) -> tuple[int, ...]:
        return tuple(
            ticket.size
            for ticket in self._live.values()
            if ticket.policy == policy and (only is None or ticket.kind == only)
        )

    def _has_active_work(self) -> bool:
        return any(ticket.kind == "active" for ticket in self._live.values())

    def _admission_applies(self) -> bool:
        return self._backend.supported or self.settings.policy_only

    def _emit(
        self, at_ms: int, kind: EventKind, ticket: str | None = None, limit_bytes: int | None = None
    ) -> None:
        self._observe(WiredEvent(at_ms, kind, ticket, limit_bytes))
