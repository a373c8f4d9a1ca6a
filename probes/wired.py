"""The wired limit of this process, shared by the requests of a server.

    manager = WiredMemoryManager()
    policy = SumPolicy(cap=18_000_000_000)
    weights = Ticket(policy, 8_309_325_824, kind="reservation")
    await manager.start(weights)
    async with manager.holding(Ticket(policy, 700_000_000)):
        ...  # generate

The rules are those of memfit.estimators.plans.wired.ledger; docs/wired.md explains them. A
manager belongs to one event loop; the limit belongs to the process, so use one manager.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic_ns

from memfit.estimators.base.errors import InputError
from memfit.estimators.plans.wired.ledger import (
    SimulatedBackend,
    Ticket,
    WiredBackend,
    WiredEvent,
    WiredLedger,
    WiredSettings,
    ignore_event,
)


class MetalBackend:
    """The limit of MLX on Metal; only for machines on which `host_backend` finds one."""

    supported = True

    @property
    def recommended_bytes(self) -> int | None:
        """The working set macOS recommends now: iogpu.wired_limit_mb moves it."""
        import mlx.core as mx

        working_set = mx.device_info().get("max_recommended_working_set_size")
        return working_set if isinstance(working_set, int) else None

    def apply(self, limit: int) -> bool:
        """Set the limit; MLX refuses one above the recommended working set."""
        import mlx.core as mx

        try:
            mx.set_wired_limit(limit)
        except (ValueError, RuntimeError):
            return False
        return True


def host_backend() -> WiredBackend:
    """Return the limit of this process on Metal; elsewhere one that is kept on paper only."""
    try:
        import mlx.core as mx
    except ImportError:
        return SimulatedBackend(supported=False)
    on_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return MetalBackend() if on_metal else SimulatedBackend(supported=False)


class WiredMemoryManager:
    """Starts tickets when their policy admits them, first come first served, and moves the limit.

    Every started ticket has to be ended; `holding` sees to it.
    """

    def __init__(
        self,
        settings: WiredSettings | None = None,
        *,
        backend: WiredBackend | None = None,
        observe: Callable[[WiredEvent], None] = ignore_event,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Take this machine's backend unless another is given.

        ``observe`` is told of every event, in order; it must neither raise nor call the manager.
        """
        self._observe, self._clock_ns = observe, clock_ns
        self._admissions: dict[str, asyncio.Future[None]] = {}
        self._ledger = WiredLedger(backend or host_backend(), settings, self._see)

    @property
    def limit_bytes(self) -> int:
        """The limit applied now."""
        return self._ledger.limit_bytes

    @property
    def held(self) -> tuple[Ticket, ...]:
        """The tickets that have started and not ended."""
        return self._ledger.held

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """The tickets that wait, first come first."""
        return self._ledger.waiting

    async def start(self, ticket: Ticket) -> int:
        """Start a ticket, waiting until its policy admits it, and return the limit.

        A task that is cancelled while it waits leaves nothing behind, nor does a ticket that is
        cancelled or ended by another task: this call then raises asyncio.CancelledError.

        Raises:
            InputError: when the policy would not admit it even alone, or it waits already.
        """
        standing = self._ledger.request(ticket, self._now_ms())
        if standing == "refused":
            raise InputError(
                f"ticket {ticket.name}: {ticket.size} bytes are more than its policy ever admits"
                f" on a baseline of {self._ledger.baseline_bytes}; raise the cap"
            )
        if standing == "waiting":
            await self._admission(ticket)
        return self.limit_bytes

    def end(self, ticket: Ticket) -> int:
        """End a ticket, let those in that wait for its room, and return the limit.

        One that waits is cancelled; one that is not known is left alone.
        """
        self._ledger.end(ticket.name, self._now_ms())
        return self.limit_bytes

    def cancel(self, ticket: Ticket) -> bool:
        """Take a waiting ticket out; say whether it was waiting."""
        waited = ticket.name in self._admissions
        self._ledger.cancel(ticket.name, self._now_ms())
        return waited

    @asynccontextmanager
    async def holding(self, ticket: Ticket) -> AsyncIterator[int]:
        """Hold a ticket for the length of a block; the limit is its value."""
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
            # The task's own end: the ticket waits still, or was admitted a moment ago. One that
            # another task took out is no longer here, and its name may be in use again.
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
