"""The manager in an event loop: waiting, cancelling, races, and the real limit."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.guard.ledger import SimulatedBackend, Ticket, WiredEvent
from memfit.estimators.guard.policies import SumPolicy
from memfit.probes.wired import MetalBackend, WiredMemoryManager, host_backend
from tests.selection import examples

POLICY = SumPolicy(100)


def manager() -> WiredMemoryManager:
    return WiredMemoryManager(backend=SimulatedBackend(supported=True))


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop."""
    return lambda: asyncio.run(asyncio.wait_for(test(), 20))


async def settled() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


@in_a_loop
async def test_a_ticket_is_active_during_its_block() -> None:
    wired = manager()
    await wired.start(Ticket(POLICY, 30, "reservation"))
    async with wired.holding(Ticket(POLICY, 50)) as limit:
        assert limit == wired.limit_bytes == 80
    assert wired.limit_bytes == 0


@in_a_loop
async def test_a_ticket_is_ended_when_its_block_fails() -> None:
    wired = manager()
    with contextlib.suppress(RuntimeError):
        async with wired.holding(Ticket(POLICY, 50)):
            raise RuntimeError
    assert wired.held == ()


@in_a_loop
async def test_a_waiting_task_continues_when_there_is_room() -> None:
    wired, first, second = manager(), Ticket(POLICY, 80), Ticket(POLICY, 90)
    await wired.start(first)
    waiting = asyncio.create_task(wired.start(second))
    await settled()
    assert not waiting.done()
    assert wired.waiting == (second,)
    wired.end(first)
    assert await waiting == 90


@in_a_loop
async def test_a_ticket_that_can_never_start_is_rejected_immediately() -> None:
    with pytest.raises(InputError, match="101 bytes are more than its policy can admit"):
        await manager().start(Ticket(POLICY, 101))


@in_a_loop
async def test_a_cancelled_task_leaves_nothing_and_unblocks_others() -> None:
    wired, runs = manager(), Ticket(POLICY, 60)
    await wired.start(runs)
    large = asyncio.create_task(wired.start(Ticket(POLICY, 70)))
    small = asyncio.create_task(wired.start(Ticket(POLICY, 10, name="small")))
    await settled()
    large.cancel()
    assert await small == 70
    assert wired.waiting == ()
    assert {ticket.name for ticket in wired.held} == {runs.name, "small"}


@in_a_loop
async def test_a_task_cancelled_at_its_admission_releases_its_memory() -> None:
    wired, first = manager(), Ticket(POLICY, 100)
    await wired.start(first)
    waiter = asyncio.create_task(wired.start(Ticket(POLICY, 100)))
    next_one = asyncio.create_task(wired.start(Ticket(POLICY, 100, name="next")))
    await settled()
    wired.end(first)
    waiter.cancel()
    await next_one
    assert waiter.cancelled()
    assert [ticket.name for ticket in wired.held] == ["next"]


@in_a_loop
async def test_memory_freed_after_a_cancellation_is_not_lost() -> None:
    wired, first = manager(), Ticket(POLICY, 100)
    await wired.start(first)
    waiter = asyncio.create_task(wired.start(Ticket(POLICY, 100)))
    next_one = asyncio.create_task(wired.start(Ticket(POLICY, 100, name="next")))
    await settled()
    waiter.cancel()
    wired.end(first)
    await next_one
    assert [ticket.name for ticket in wired.held] == ["next"]


@in_a_loop
async def test_a_ticket_cancelled_by_another_task_raises_in_the_waiting_one() -> None:
    wired, second = manager(), Ticket(POLICY, 1)
    await wired.start(Ticket(POLICY, 100))
    waiting = asyncio.create_task(wired.start(second))
    await settled()
    assert wired.cancel(second)
    assert not wired.cancel(second)
    await settled()
    assert waiting.cancelled()
    assert wired.waiting == ()


@in_a_loop
async def test_a_name_reused_after_a_cancellation_is_kept() -> None:
    wired, first, again = manager(), Ticket(POLICY, 100), Ticket(POLICY, 50, name="again")
    await wired.start(first)
    waiting = asyncio.create_task(wired.start(again))
    await settled()
    wired.cancel(again)
    wired.end(first)
    await wired.start(again)
    await settled()
    assert waiting.cancelled()
    assert wired.held == (again,)


@in_a_loop
async def test_a_wait_can_have_a_timeout() -> None:
    wired = manager()
    await wired.start(Ticket(POLICY, 100))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(wired.start(Ticket(POLICY, 1)), 0.01)
    assert wired.waiting == ()


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_any_number_of_tasks_run_in_order_within_the_cap(seed: int, task_count: int) -> None:
    dice = random.Random(seed)
    started: list[str] = []

    def see(event: WiredEvent) -> None:
        if event.kind == "started" and event.ticket:
            started.append(event.ticket)

    async def client(wired: WiredMemoryManager, ticket: Ticket) -> None:
        async with wired.holding(ticket):
            assert sum(held.size for held in wired.held) <= 100
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)

    async def test() -> None:
        wired = WiredMemoryManager(backend=SimulatedBackend(supported=True), observe=see)
        tasks = {}
        for index in range(task_count):
            ticket = Ticket(POLICY, dice.randrange(1, 101), name=f"t{index}")
            tasks[ticket.name] = asyncio.create_task(client(wired, ticket))
            await asyncio.sleep(0)
            if dice.random() < 0.3:
                dice.choice(list(tasks.values())).cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for name, task in tasks.items():
            assert task.cancelled() or name in started
            assert task.cancelled() or task.exception() is None
        assert (wired.held, wired.waiting, wired.limit_bytes) == ((), (), 0)
        assert started == sorted(started, key=lambda name: int(name[1:]))

    asyncio.run(asyncio.wait_for(test(), 20))


def test_this_machine_uses_its_gpus_limit_or_a_simulated_one() -> None:
    mx = pytest.importorskip("mlx.core", reason="the backend is MLX")
    backend = host_backend()
    assert backend.supported == mx.metal.is_available()
    assert backend.supported or backend.recommended_bytes is None


def test_the_limit_is_really_set_on_metal() -> None:
    mx = pytest.importorskip("mlx.core", reason="the limit is MLX's")
    if not mx.metal.is_available():
        pytest.skip("MLX has no wired limit here")
    backend = MetalBackend()
    before = mx.set_wired_limit(0)
    try:
        assert backend.apply(2**30)
        assert mx.set_wired_limit(0) == 2**30
        assert not backend.apply((backend.recommended_bytes or 0) + 1)
    finally:
        mx.set_wired_limit(before)
