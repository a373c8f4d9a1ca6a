"""``memfit plan wired``: simulate a scenario of tickets, and find the limit to set for it."""

import heapq
from collections.abc import Iterable, Iterator

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import format_duration, open_limit, open_size
from memfit.estimators.guard.ledger import SimulatedBackend, WiredEvent, WiredLedger
from memfit.estimators.machine.device import RISK, Device, wired_limit
from memfit.estimators.plans.wired.scenario import (
    Change,
    DraftAdmission,
    ScheduledTicket,
    WiredScenario,
)
from memfit.estimators.results.result import both_units
from memfit.estimators.results.wired import (
    TicketOutcome,
    TicketPlan,
    WiredMachine,
    WiredMoment,
    WiredPlan,
    WiredVerdict,
)

# At the same time tickets end, then settings change, then others start.
_ENDS, _CHANGES, _STARTS = 0, 1, 2


def plan_wired(scenario: WiredScenario) -> WiredPlan:
    """Return what happens in a scenario."""
    simulation = _Simulation(scenario)
    simulation.run()
    tickets = tuple(simulation.ticket_plan(each) for each in scenario.tickets)
    moments = simulation.moments
    largest = max(moments, key=lambda moment: moment.wanted_bytes)
    refused = sum(event.kind == "limit_refused" for event in simulation.events)
    device = scenario.device
    need = None
    if scenario.mode == "wired" and device is not None:
        need = wired_limit(largest.wanted_bytes, device)
    return both_units(
        WiredPlan(
            scenario=scenario.name,
            device=None if device is None else _machine(device),
            mode=scenario.mode,
            shrink_threshold_percent=float(100 * scenario.settings.shrink_threshold),
            shrink_cooldown_ms=scenario.settings.shrink_cooldown_ms,
            baseline_bytes=simulation.ledger.baseline_bytes,
            policies=dict(scenario.policies),
            verdict=_verdict(tickets, refused + len(simulation.refused_changes)),
            largest_limit_bytes=largest.wanted_bytes,
            largest_limit_at_ms=largest.at_ms,
            largest_demand_bytes=max(moment.demand_bytes for moment in moments),
            longest_wait_ms=max(ticket.waited_ms for ticket in tickets),
            refused_limits=refused,
            refused_changes_ms=tuple(simulation.refused_changes),
            sysctl_mebibytes=need.sysctl_mebibytes if need else None,
            left_for_system_bytes=need.left_for_system_bytes if need else None,
            tickets=tickets,
            moments=tuple(moments),
            notes=(
                *scenario.notes,
                *_notes(scenario, moments, largest.wanted_bytes, refused),
                *([f"iogpu.wired_limit_mb: {RISK}"] if need and need.sysctl_mebibytes else ()),
                *_refused_changes(simulation.refused_changes),
            ),
        )
    )


def _machine(device: Device) -> WiredMachine:
    return WiredMachine(device.name, device.backend, device.memory_bytes, device.working_set_bytes)


def _verdict(tickets: tuple[TicketPlan, ...], refused_limits: int) -> WiredVerdict:
    if refused_limits or any(ticket.outcome in ("refused", "waiting") for ticket in tickets):
        return "fails"
    return "waits" if any(ticket.waited_ms for ticket in tickets) else "holds"


def _notes(
    scenario: WiredScenario,
    moments: list[WiredMoment],
    largest_limit: int,
    refused_limits: int,
) -> Iterator[str]:
    device = scenario.device
    if scenario.mode == "policy-only":
        yield "no limit is set in this mode: tickets are only admitted and counted"
    if refused_limits and device is not None:
        yield (
            f"MLX refuses limits above the working set of {open_limit(device.working_set_bytes)}"
        )
        if largest_limit >= device.memory_bytes:
            yield "no setting helps: the largest limit is not below the memory of the machine"
    short = next((m for m in moments if m.active and m.limit_bytes < m.demand_bytes), None)
    if short is not None and scenario.mode == "wired":
        yield (
            f"at {format_duration(short.at_ms)} the tickets need"
            f" {open_size(short.demand_bytes)} with a limit of"
            f" {open_limit(short.limit_bytes)}: the rest may be paged out"
        )


def _refused_changes(times: Iterable[int]) -> Iterator[str]:
    for at_ms in times:
        yield (
            f"at {format_duration(at_ms)} the configuration cannot change while a ticket runs or"
            " waits: mlx-swift ends the program there"
        )


class _Simulation:
    """A scenario while it runs: scheduled starts and ends, and what happened so far."""

    def __init__(self, scenario: WiredScenario) -> None:
        self.scenario = scenario
        device = scenario.device
        recommended = device.working_set_bytes if device and device.backend == "metal" else None
        self._backend = SimulatedBackend(scenario.mode == "wired", recommended)
        self.ledger = WiredLedger(self._backend, scenario.settings, self._observe)
        self.events: list[WiredEvent] = []
        self.moments: list[WiredMoment] = []
        self._tickets = {each.ticket.name: each for each in scenario.tickets}
        self._reasons: dict[str, str] = {}
        # When each kind of event happened to a ticket.
        self._times: dict[tuple[str, str], int] = {}
        # Time, end or start, order of scheduling, ticket.
        self._queue: list[tuple[int, int, int, ScheduledTicket | Change]] = []
        self.refused_changes: list[int] = []
        self._scheduled = 0

    def run(self) -> None:
        """Run all events, and record a moment after each time at which something happens."""
        for each in self.scenario.tickets:
            self._schedule(each.start_ms, _STARTS, each)
            if each.end_ms is not None:
                self._schedule(each.end_ms, _ENDS, each)
        for change in self.scenario.changes:
            self._schedule(change.at_ms, _CHANGES, change)
        while self._queue:
            now, what, _, scheduled = heapq.heappop(self._queue)
            if isinstance(scheduled, Change):
                self._change(scheduled)
            elif what == _ENDS:
                self.ledger.end(scheduled.ticket.name, now)
            else:
                self._start(scheduled, now)
            if not self._queue or self._queue[0][0] != now:
                self.moments.append(self._moment(now))

    def _change(self, change: Change) -> None:
        try:
            self.ledger.configure(change.settings)
        except InputError:
            self.refused_changes.append(change.at_ms)

    def _schedule(self, at_ms: int, what: int, scheduled: ScheduledTicket | Change) -> None:
        heapq.heappush(self._queue, (at_ms, what, self._scheduled, scheduled))
        self._scheduled += 1

    def _observe(self, event: WiredEvent) -> None:
        self.events.append(event)
        if event.ticket is None:
            return
        self._times[event.ticket, event.kind] = event.at_ms
        scheduled = self._tickets[event.ticket]
        if event.kind == "started" and scheduled.runs_ms is not None:
            self._schedule(event.at_ms + scheduled.runs_ms, _ENDS, scheduled)

    def _start(self, scheduled: ScheduledTicket, now: int) -> None:
        ticket = scheduled.ticket
        if scheduled.draft is not None:
            reason = self._draft_problem(scheduled.draft, ticket.size)
            if reason is not None:
                self._reasons[ticket.name] = reason
                return
        if self.ledger.request(ticket, now) == "refused":
            baseline = self.ledger.baseline_bytes
            bound = ticket.policy.limit(baseline, (ticket.size,), self._backend.recommended_bytes)
            self._reasons[ticket.name] = (
                f"does not fit even alone under {open_limit(bound)},"
                f" of which {open_size(baseline)} are baseline"
            )

    def _draft_problem(self, draft: DraftAdmission, size: int) -> str | None:
        """Why a draft model is not loaded, None when it is."""
        main = next((each for each in self.ledger.held if each.name == draft.main), None)
        if main is None:
            return "its main model is not loaded at that time"
        pair = draft.policy.evaluate(main.size, size, self._backend.recommended_bytes)
        if pair.use_draft:
            return None
        return (
            f"main, draft and additional take {open_size(pair.estimated_bytes)}"
            f" of {open_limit(pair.limit_bytes or 0)}"
        )

    def _moment(self, now: int) -> WiredMoment:
        held, waiting = self.ledger.held, self.ledger.waiting
        return WiredMoment(
            at_ms=now,
            limit_bytes=self.ledger.limit_bytes,
            wanted_bytes=self.ledger.wanted_bytes,
            demand_bytes=sum(ticket.size for ticket in held),
            waiting_bytes=sum(ticket.size for ticket in waiting),
            active=sum(ticket.kind == "active" for ticket in held),
            reserved=sum(ticket.kind == "reservation" for ticket in held),
            waiting=len(waiting),
        )

    def ticket_plan(self, scheduled: ScheduledTicket) -> TicketPlan:
        name, outcome = scheduled.ticket.name, self._outcome(scheduled)
        started = self._times.get((name, "started"))
        until = {
            "admitted": started,
            "gave_up": self._times.get((name, "cancelled")),
            "waiting": self.moments[-1].at_ms,
        }.get(outcome)
        return TicketPlan(
            name=name,
            policy=scheduled.policy,
            kind=scheduled.ticket.kind,
            size_bytes=scheduled.ticket.size,
            asked_ms=scheduled.start_ms,
            waited_ms=0 if until is None else until - scheduled.start_ms,
            started_ms=started,
            ended_ms=self._times.get((name, "ended")),
            outcome=outcome,
            reason=self._reasons.get(name),
            source=scheduled.source,
        )

    def _outcome(self, scheduled: ScheduledTicket) -> TicketOutcome:
        name, draft = scheduled.ticket.name, scheduled.draft
        if (name, "started") in self._times:
            return "admitted"
        if (name, "cancelled") in self._times:
            return "gave_up"
        if name not in self._reasons:
            return "waiting"
        return "left_out" if draft and draft.policy.over_budget == "fallback" else "refused"
