"""The queue of a guarded server: requests are tickets of the ledger, and start when the guard says.

No request overtakes another, so that none waits for ever.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from memfit.estimators.guard.guard import Admit, Evict, Guard, Refuse, Wait
from memfit.estimators.guard.ledger import (
    SimulatedBackend,
    Ticket,
    WiredBackend,
    WiredEvent,
    WiredLedger,
    WiredSettings,
    ignore_event,
)
from memfit.estimators.guard.policies import FixedPolicy
from memfit.estimators.guard.state import Request, State


class Guarded(Protocol):
    """What a queue is in front of: a server, or its replay."""

    def state(self) -> State:
        """Return what is held now, with the requests that were started and not called yet."""

    def request(self, name: str) -> Request:
        """Return what a waiting request needs now: how much of it is cached can change."""

    def is_free(self, name: str) -> bool:
        """Return whether a request may run beside what does: some run alone."""

    def evict(self, ids: Sequence[Any]) -> None:
        """Drop stored caches."""

    def start(self, name: str, admitted: Admit) -> None:
        """Take a request, and lower the prefill step to what is admitted."""

    def wait(self, name: str, decision: Wait) -> None:
        """Note that the first of the queue has to wait."""


class AdmissionQueue:
    """Requests that run, and those that wait for them."""

    def __init__(
        self,
        guard: Guard,
        server: Guarded,
        *,
        backend: WiredBackend | None = None,
        settings: WiredSettings | None = None,
        observe: Callable[[WiredEvent], None] = ignore_event,
    ) -> None:
        """Admit to a server; with a backend of Metal the wired limit follows, up to the guard's."""
        self._guard, self._server = guard, server
        self._policy = FixedPolicy(guard.limit_bytes)
        self._ledger = WiredLedger(backend or SimulatedBackend(supported=False), settings, observe)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The requests that wait, in order of arrival."""
        return tuple(ticket.name for ticket in self._ledger.waiting)

    @property
    def waiting_bytes(self) -> int:
        """What the requests that wait need above the weights, each alone."""
        return sum(ticket.size for ticket in self._ledger.waiting)

    def request(self, name: str, now_ms: int) -> Refuse | None:
        """Start a request or let it wait; return why, where it will never start."""
        asked = self._server.request(name)
        alone = self._guard.preflight(asked.new + asked.cached, asked.max_tokens)
        if isinstance(alone, Refuse):
            return alone
        size = alone.peak_bytes - self._guard.tables.weights_bytes
        self._ledger.request(
            Ticket(self._policy, size, name=name, may_start=lambda: self._may_start(name)), now_ms
        )
        return None

    def end(self, name: str, now_ms: int) -> None:
        """Note that a request ended, or gave up waiting; others start in its place."""
        self._ledger.end(name, now_ms)

    def retry(self, now_ms: int) -> None:
        """Start the waiting requests that fit now."""
        self._ledger.retry(now_ms)

    def store(self, tokens: int) -> bool:
        """Return whether a finished cache may be kept, for which the oldest may have to go."""
        state = self._server.state()
        entries = sorted(
            (each for each in state.entries if not each.is_pinned), key=lambda each: each.used
        )
        while not self._guard.store(tokens, state):
            if not entries:
                return False
            self._server.evict([entries.pop(0).id])
            state = self._server.state()
        return True

    def _may_start(self, name: str) -> bool:
        if not self._server.is_free(name):
            return False
        decision = self._guard.admit(self._server.request(name), self._server.state())
        if isinstance(decision, Evict):
            self._server.evict(decision.ids)
            # Without the entry that it began with, the prompt is longer: what fits is another.
            return self._may_start(name)
        if isinstance(decision, Wait):
            self._server.wait(name, decision)
        if isinstance(decision, Admit):
            self._server.start(name, decision)
        return isinstance(decision, Admit)
