"""The ledger: which tickets start or wait, and the limit.

Goldens from mlx-swift's WiredMemoryTests.swift, in MiB as there; the rest are properties.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memfit.estimators.base.errors import InputError
from memfit.estimators.guard.ledger import (
    SimulatedBackend,
    Ticket,
    WiredEvent,
    WiredLedger,
    WiredSettings,
)
from memfit.estimators.guard.policies import FixedPolicy, MaxPolicy, SumPolicy, WiredPolicy
from memfit.estimators.results.wired import TicketKind

MIB = 2**20
METAL = SimulatedBackend(supported=True)


@dataclass(frozen=True)
class DoubledSum:
    """mlx-swift's example of a custom policy."""

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        return baseline + 2 * sum(sizes)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        return True


@dataclass(frozen=True)
class CappedBesideBaseline:
    """mlx-swift's test policy with a cap that excludes the baseline."""

    cap: int

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        return baseline + sum(sizes)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        return sum(sizes) + size <= self.cap


@dataclass
class Counting:
    """A backend that accepts limits up to a working set and records them."""

    recommended_bytes: int | None = None
    supported: bool = True
    applied: list[int] = field(default_factory=list)

    def apply(self, limit: int) -> bool:
        if self.recommended_bytes is not None and limit > self.recommended_bytes:
            return False
        self.applied.append(limit)
        return True


def active(name: str, mebibytes: int, policy: WiredPolicy | None = None) -> Ticket:
    return Ticket(policy or SumPolicy(), mebibytes * MIB, name=name)


def reservation(name: str, mebibytes: int, policy: WiredPolicy | None = None) -> Ticket:
    return Ticket(policy or SumPolicy(), mebibytes * MIB, "reservation", name)


def ledger(baseline: int = 10, threshold: str = "0.25", cooldown_ms: int = 1000) -> WiredLedger:
    settings = WiredSettings(Fraction(threshold), cooldown_ms, baseline_override=baseline * MIB)
    return WiredLedger(METAL, settings)


def limit_of(wired: WiredLedger) -> int:
    """The limit above the baseline of 10 MiB."""
    return wired.limit_bytes // MIB - 10


def test_the_largest_group_sets_the_limit() -> None:
    wired = ledger()
    wired.request(active("a", 64), 0)
    wired.request(active("b", 64), 0)
    wired.request(active("c", 96, DoubledSum()), 0)
    assert limit_of(wired) == 192
    wired.end("c", 5000)
    assert limit_of(wired) == 128


def test_a_reservation_counts_but_alone_does_not_raise_the_limit() -> None:
    wired = ledger()
    wired.request(reservation("weights", 128), 0)
    assert limit_of(wired) == 0
    wired.request(active("a", 64), 0)
    assert limit_of(wired) == 192
    wired.end("a", 0)
    assert limit_of(wired) == 0
    assert [ticket.name for ticket in wired.held] == ["weights"]


def test_a_small_decrease_is_delayed() -> None:
    wired = ledger(threshold="0.5", cooldown_ms=0)
    wired.request(active("large", 300), 0)
    wired.request(active("small", 20), 0)
    wired.end("small", 10_000)
    assert limit_of(wired) == 320
    assert wired.wanted_bytes == 310 * MIB
    wired.end("large", 10_000)
    assert limit_of(wired) == 0


def test_an_early_decrease_is_delayed_and_applied_later() -> None:
    wired = ledger(threshold="0", cooldown_ms=500)
    wired.request(active("a", 100), 0)
    wired.request(active("b", 300), 0)
    wired.end("b", 0)
    assert limit_of(wired) == 400
    wired.request(active("c", 50), 600)
    assert limit_of(wired) == 150


@pytest.mark.parametrize(("stays", "limit"), [(75, 75), (76, 100)])
def test_a_decrease_of_exactly_the_threshold_is_applied(stays: int, limit: int) -> None:
    wired = WiredLedger(METAL, WiredSettings(shrink_cooldown_ms=0))
    wired.request(Ticket(SumPolicy(), stays, name="stays"), 0)
    wired.request(Ticket(SumPolicy(), 100 - stays, name="goes"), 0)
    wired.end("goes", 0)
    assert wired.limit_bytes == limit


@pytest.mark.parametrize(("elapsed", "limit"), [(999, 400), (1000, 100)])
def test_the_cooldown_ends_exactly_on_time(elapsed: int, limit: int) -> None:
    wired = ledger()
    wired.request(active("a", 100), 0)
    wired.request(active("b", 300), 5000)
    wired.end("b", 5000 + elapsed)
    assert limit_of(wired) == limit


@pytest.mark.parametrize("policy", [SumPolicy(160 * MIB), CappedBesideBaseline(150 * MIB)])
def test_weights_count_for_admission(policy: WiredPolicy) -> None:
    wired = ledger()
    assert wired.request(reservation("weights", 100, policy), 0) == "started"
    assert wired.request(active("a", 40, policy), 0) == "started"
    assert wired.request(active("b", 20, policy), 0) == "waiting"
    assert [ticket.name for ticket in wired.end("a", 0)] == ["b"]


def test_policy_only_mode_admits_and_counts_without_touching_the_limit() -> None:
    backend = Counting(supported=False)
    wired = WiredLedger(backend, WiredSettings(baseline_override=1024))
    policy = CappedBesideBaseline(150 * MIB)
    wired.request(reservation("weights", 100, policy), 0)
    wired.request(active("a", 40, policy), 0)
    assert wired.baseline_bytes == 1024
    assert wired.request(active("b", 20, policy), 0) == "waiting"
    assert wired.limit_bytes == 1024 + 140 * MIB
    assert backend.applied == []


def test_without_policy_only_mode_everything_starts_and_nothing_is_recorded() -> None:
    wired = WiredLedger(Counting(supported=False), WiredSettings(policy_only=False))
    assert wired.request(active("a", 100, SumPolicy(1)), 0) == "started"
    assert (wired.limit_bytes, wired.held, wired.end("a", 0)) == (0, (), ())


@pytest.mark.parametrize(
    ("backend", "override", "baseline"),
    [
        (Counting(500), 7, 7),
        (Counting(500), None, 0),
        (Counting(500, supported=False), None, 500),
        (Counting(None, supported=False), None, 0),
    ],
)
def test_the_baseline_is_the_override_or_the_default_of_the_backend(
    backend: Counting, override: int | None, baseline: int
) -> None:
    wired = WiredLedger(backend, WiredSettings(baseline_override=override))
    wired.request(Ticket(MaxPolicy(), 3, "reservation", "weights"), 0)
    assert wired.baseline_bytes == baseline


def test_the_baseline_is_restored_and_used_again() -> None:
    backend = Counting(500)
    wired = WiredLedger(backend, WiredSettings())
    for _ in range(2):
        wired.request(Ticket(SumPolicy(), 100, name="a"), 0)
        wired.end("a", 0)
    assert backend.applied == [100, 0, 100, 0]


def test_a_limit_that_mlx_rejects_stays_unchanged_and_is_reported() -> None:
    events: list[WiredEvent] = []
    wired = WiredLedger(Counting(150), WiredSettings(), events.append)
    wired.request(Ticket(SumPolicy(200), 100, name="a"), 0)
    wired.request(Ticket(SumPolicy(200), 100, name="b"), 0)
    assert (wired.limit_bytes, wired.wanted_bytes) == (100, 200)
    assert [e.limit_bytes for e in events if e.kind == "limit_refused"] == [200]


def test_a_ticket_that_can_never_fit_is_rejected_and_blocks_no_other() -> None:
    wired = WiredLedger(METAL)
    assert wired.request(Ticket(SumPolicy(100), 101, name="giant"), 0) == "refused"
    assert wired.request(Ticket(SumPolicy(100), 100, name="fits"), 0) == "started"
    assert wired.waiting == ()


def test_a_small_ticket_does_not_overtake_one_that_waits_for_active_work() -> None:
    wired, policy = WiredLedger(METAL), SumPolicy(100)
    wired.request(Ticket(policy, 60, name="runs"), 0)
    assert wired.request(Ticket(policy, 70, name="large"), 0) == "waiting"
    assert wired.request(Ticket(policy, 10, name="small"), 0) == "waiting"
    assert [ticket.name for ticket in wired.end("runs", 0)] == ["large", "small"]


def test_a_ticket_blocked_only_by_a_reservation_blocks_no_other() -> None:
    wired, policy = WiredLedger(METAL), SumPolicy(100)
    wired.request(Ticket(policy, 60, "reservation", "weights"), 0)
    assert wired.request(Ticket(policy, 70, name="large"), 0) == "waiting"
    assert wired.request(Ticket(policy, 10, name="small"), 0) == "started"
    assert wired.request(Ticket(policy, 31, name="later"), 0) == "waiting"
    # After the weights end it is next, before later tickets.
    assert [ticket.name for ticket in wired.end("weights", 0)] == ["large"]
    assert [ticket.name for ticket in wired.waiting] == ["later"]


def test_one_group_does_not_block_another() -> None:
    wired = WiredLedger(METAL)
    wired.request(Ticket(SumPolicy(100), 100, name="a"), 0)
    wired.request(Ticket(SumPolicy(100), 1, name="b"), 0)
    assert wired.request(Ticket(SumPolicy(200), 1, name="c"), 0) == "started"


def test_the_limit_does_not_dip_between_an_end_and_a_start() -> None:
    backend = Counting()
    wired = WiredLedger(backend, WiredSettings(Fraction(0), 0))
    wired.request(Ticket(SumPolicy(100), 80, name="a"), 0)
    wired.request(Ticket(SumPolicy(100), 90, name="b"), 0)
    wired.end("a", 0)
    assert backend.applied == [80, 90]


def test_a_cancelled_waiting_ticket_unblocks_those_behind_it() -> None:
    wired, policy = WiredLedger(METAL), SumPolicy(100)
    wired.request(Ticket(policy, 60, name="runs"), 0)
    wired.request(Ticket(policy, 70, name="large"), 0)
    wired.request(Ticket(policy, 10, name="small"), 0)
    assert [ticket.name for ticket in wired.cancel("large", 0)] == ["small"]
    assert wired.waiting == ()


def test_a_group_without_running_tickets_needs_nothing() -> None:
    wired = WiredLedger(METAL, WiredSettings(shrink_cooldown_ms=0))
    wired.request(Ticket(SumPolicy(), 50, name="stays"), 0)
    wired.request(Ticket(FixedPolicy(500), 1, name="goes"), 0)
    assert wired.limit_bytes == 500
    wired.end("goes", 0)
    assert wired.limit_bytes == 50


def test_a_second_start_and_a_second_end_have_no_effect() -> None:
    wired = WiredLedger(METAL)
    ticket = Ticket(SumPolicy(), 100, name="a")
    assert wired.request(ticket, 0) == wired.request(ticket, 0) == "started"
    assert wired.limit_bytes == 100
    wired.end("a", 0)
    assert (wired.end("a", 0), wired.cancel("b", 0), wired.limit_bytes) == ((), (), 0)


def test_the_name_of_a_waiting_ticket_cannot_be_reused() -> None:
    wired = WiredLedger(METAL)
    wired.request(Ticket(SumPolicy(100), 100, name="a"), 0)
    wired.request(Ticket(SumPolicy(100), 1, name="b"), 0)
    with pytest.raises(InputError, match="b waits already"):
        wired.request(Ticket(SumPolicy(100), 1, name="b"), 0)


def test_settings_out_of_range_are_rejected() -> None:
    with pytest.raises(InputError, match="shrink threshold"):
        WiredSettings(shrink_threshold=Fraction(2))
    with pytest.raises(InputError, match="shrink cooldown"):
        WiredSettings(shrink_cooldown_ms=-1)
    with pytest.raises(InputError):
        WiredSettings(baseline_override=-1)
    with pytest.raises(InputError):
        Ticket(SumPolicy(), -1)


POLICIES: tuple[WiredPolicy, ...] = (SumPolicy(100), SumPolicy(60), MaxPolicy(), FixedPolicy(50))


class AnyTraffic(RuleBasedStateMachine):
    """Any order of starts, ends and cancellations, each some time after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.events = Counting(90), list[WiredEvent]()
        self.wired = WiredLedger(self.backend, WiredSettings(), self.events.append)
        self.now, self.asked = 0, dict[str, Ticket]()

    @rule(
        policy=st.sampled_from(POLICIES),
        size=st.integers(0, 120),
        kind=st.sampled_from(("active", "active", "reservation")),
        later=st.integers(0, 700),
    )
    def start(self, policy: WiredPolicy, size: int, kind: TicketKind, later: int) -> None:
        self.now += later
        ticket = Ticket(policy, size, kind, f"t{len(self.asked)}")
        before = self.wired.limit_bytes
        if self.wired.request(ticket, self.now) == "started":
            self._grows_at_once(before)
        self.asked[ticket.name] = ticket

    @precondition(lambda self: self.wired.held)
    @rule(which=st.integers(0), later=st.integers(0, 700))
    def end(self, which: int, later: int) -> None:
        self.now += later
        held, before = self.wired.held, self.wired.limit_bytes
        self.wired.end(held[which % len(held)].name, self.now)
        self._grows_at_once(before)

    @precondition(lambda self: self.wired.waiting)
    @rule(which=st.integers(0), later=st.integers(0, 700))
    def cancel(self, which: int, later: int) -> None:
        self.now += later
        waiting = self.wired.waiting
        self.wired.cancel(waiting[which % len(waiting)].name, self.now)

    def _grows_at_once(self, before: int) -> None:
        wanted = self.wired.wanted_bytes
        if wanted >= before and wanted <= 90:
            assert self.wired.limit_bytes == wanted

    @invariant()
    def the_tickets_of_a_group_stay_within_its_cap(self) -> None:
        for policy in POLICIES[:2]:
            assert isinstance(policy, SumPolicy)
            held = [ticket.size for ticket in self.wired.held if ticket.policy == policy]
            assert sum(held) <= (policy.cap or 0)

    @invariant()
    def no_limit_is_above_what_mlx_takes_nor_below_what_is_wanted(self) -> None:
        assert self.wired.limit_bytes <= 90
        assert self.wired.limit_bytes >= self.wired.wanted_bytes or self.wired.wanted_bytes > 90
        assert (self.backend.applied or [0])[-1] == self.wired.limit_bytes

    @invariant()
    def every_ticket_is_in_one_place(self) -> None:
        last = {event.ticket: event.kind for event in self.events if event.ticket}
        held = {ticket.name for ticket in self.wired.held}
        waiting = {ticket.name for ticket in self.wired.waiting}
        assert set(last) == set(self.asked)
        assert held == {name for name, kind in last.items() if kind == "started"}
        assert waiting == {name for name, kind in last.items() if kind == "waiting"}

    @invariant()
    def without_work_the_limit_is_the_baseline(self) -> None:
        if not any(ticket.kind == "active" for ticket in self.wired.held):
            assert self.wired.limit_bytes == self.wired.baseline_bytes == 0

    @invariant()
    def the_first_of_a_group_waits_only_for_room(self) -> None:
        for policy in POLICIES:
            first = next((t for t in self.wired.waiting if t.policy == policy), None)
            held = [ticket.size for ticket in self.wired.held if ticket.policy == policy]
            assert first is None or not policy.admits(0, held, first.size, 90)

    def teardown(self) -> None:
        """Every waiting ticket starts after those before it have ended."""
        while self.wired.held:
            self.wired.end(self.wired.held[0].name, self.now)
        assert self.wired.waiting == ()
        assert self.wired.limit_bytes == 0


TestAnyTraffic = AnyTraffic.TestCase


@given(st.lists(st.integers(1, 100), min_size=2, max_size=30))
def test_tickets_of_one_kind_start_in_order_of_arrival(sizes: list[int]) -> None:
    started: list[str] = []

    def see(event: WiredEvent) -> None:
        if event.kind == "started" and event.ticket:
            started.append(event.ticket)

    wired = WiredLedger(METAL, WiredSettings(), see)
    names = [f"t{index}" for index in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        wired.request(Ticket(SumPolicy(100), size, name=name), 0)
    while wired.held:
        wired.end(wired.held[-1].name, 0)
    assert started == names
