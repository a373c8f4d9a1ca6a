"""Manage the wired limit of a server process for its concurrent requests.

    manager = WiredMemoryManager()
    policy = SumPolicy(cap=18_000_000_000)
    weights = Ticket(policy, 8_309_325_824, kind="reservation")
    await manager.start(weights)
    async with manager.holding(Ticket(policy, 700_000_000)):
        ...  # generate

The rules are those of memfit.estimators.guard.ledger; docs/wired.md explains them. A
manager belongs to one event loop; the limit belongs to the process, so use one manager.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic_ns

from memfit.estimators.base.errors import InputError
from memfit.estimators.guard.ledger import (
    SimulatedBackend,
    Ticket,
    WiredBackend,
    WiredEvent,
    WiredLedger,
    WiredSettings,
    ignore_event,
)


class MetalBackend:
    """MLX's wired limit on Metal; use `host_backend`, which checks for Metal."""

    supported = True

    @property
    def recommended_bytes(self) -> int | None:
        """The working set that macOS recommends now; sysctl iogpu.wired_limit_mb changes it."""
        import mlx.core as mx

        working_set = mx.device_info().get("max_recommended_working_set_size")
        return working_set if isinstance(working_set, int) else None

    def apply(self, limit: int) -> bool:
        """Set the limit; MLX rejects one above the recommended working set."""
        import mlx.core as mx

        try:
            mx.set_wired_limit(limit)
        except (ValueError, RuntimeError):
            return False
        return True


def host_backend() -> WiredBackend:
    """Return the backend of this process: MLX's on Metal, elsewhere a simulated one."""
    try:
        import mlx.core as mx
    except ImportError:
        return SimulatedBackend(supported=False)
    on_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return MetalBackend() if on_metal else SimulatedBackend(supported=False)


class WiredMemoryManager:
    """Starts tickets in order when their policy admits them, and sets the limit.

    Every started ticket must be ended; `holding` does that.
    """

    def __init__(
        self,
        settings: WiredSettings | None = None,
        *,
        backend: WiredBackend | None = None,
        observe: Callable[[WiredEvent], None] = ignore_event,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Use this machine's backend unless another is given.

        ``observe`` is called with every event, in order. It must not raise or call the manager.
        """
        self._observe, self._clock_ns = observe, clock_ns
        self._admissions: dict[str, asyncio.Future[None]] = {}
        self._ledger = WiredLedger(backend or host_backend(), settings, self._see)

    @property
    def limit_bytes(self) -> int:
        return self._ledger.limit_bytes

    @property
    def held(self) -> tuple[Ticket, ...]:
        """The tickets that have started and not ended."""
        return self._ledger.held

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """The tickets that wait, in the order of their requests."""
        return self._ledger.waiting

    def configure(self, settings: WiredSettings) -> None:
        """Replace the settings, which hold from the next ticket on.

        Raises:
            InputError: while a ticket runs or waits; reservations may be held.
        """
        self._ledger.configure(settings)

    async def start(self, ticket: Ticket) -> int:
        """Start a ticket, wait until its policy admits it, and return the limit.

        When the waiting task is cancelled, its ticket is removed. When another task cancels or
        ends the ticket, this call raises asyncio.CancelledError.

        Raises:
            InputError: when the policy would not admit it even alone, or it already waits.
        """
        standing = self._ledger.request(ticket, self._now_ms())
        if standing == "refused":
            raise InputError(
                f"ticket {ticket.name}: {ticket.size} bytes are more than its policy can admit"
                f" with a baseline of {self._ledger.baseline_bytes}; raise the cap"
            )
        if standing == "waiting":
            await self._admission(ticket)
        return self.limit_bytes

    def end(self, ticket: Ticket) -> int:
        """End a ticket, start those that wait for its memory, and return the limit.

        A waiting ticket is cancelled; an unknown one is ignored.
        """
        self._ledger.end(ticket.name, self._now_ms())
        return self.limit_bytes

    def cancel(self, ticket: Ticket) -> bool:
        """Remove a waiting ticket; return whether it was waiting."""
        waited = ticket.name in self._admissions
        self._ledger.cancel(ticket.name, self._now_ms())
        return waited

    @asynccontextmanager
    async def holding(self, ticket: Ticket) -> AsyncIterator[int]:
        """Start a ticket, and end it after the block; yields the limit."""
        limit = await self.start(ticket)
        try:
            yield limit
        finally:
            self.end(ticket)

    async def _admission(self, ticket: Ticket) -> None:
        admission = asyncio.get_running_loop().create_future()
        self._admissions[ticket.name] = admission
        try:
            await admission
        except asyncio.CancelledError:
            # The task was cancelled: its ticket still waits, or was admitted a moment ago. If
            # another task removed the ticket, it is gone, and its name may be in use again.
            if self._admissions.get(ticket.name) is admission:
                self.end(ticket)
            raise
        finally:
            if self._admissions.get(ticket.name) is admission:
                del self._admissions[ticket.name]

    def _see(self, event: WiredEvent) -> None:
        admission = self._admissions.get(event.ticket or "")
        if admission is not None and event.kind == "started" and not admission.done():
            admission.set_result(None)
        elif admission is not None and event.kind == "cancelled":
            del self._admissions[event.ticket or ""]
            admission.cancel()
        self._observe(event)

    def _now_ms(self) -> int:
        return self._clock_ns() // 1_000_000
