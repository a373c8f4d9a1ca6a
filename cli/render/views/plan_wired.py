"""A plan of wired memory as a document."""

from collections.abc import Iterator, Sequence

from memfit.cli.render.document import Bar, BarChart, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import budget_of
from memfit.estimators.base.units import Units, format_bytes, format_duration, format_limit
from memfit.estimators.results.wired import TicketPlan, WiredMoment, WiredPlan

MOST_ROWS = 30
_COLOURS = {"holds": "green", "waits": "yellow", "fails": "red"}
_TICKETS = ("Ticket", "Kind", "Outcome", "Size", "Requested", "Waited", "Started", "Ended")
_MOMENTS = ("Time", "Limit", "Wanted", "Demand", "Waiting", "Active", "Reserved", "Queue")
_OUTCOMES = {
    "admitted": "admitted",
    "refused": "refused",
    "gave_up": "gave up",
    "waiting": "never admitted",
    "left_out": "left out",
}
_VERDICTS = {
    "holds": "Holds: every ticket starts at once",
    "waits": "Waits: every ticket that does not give up is admitted",
    "fails": "Fails",
}


@view(WiredPlan)
def to_document(result: WiredPlan, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds a chart of limit and demand over time."""
    sources = (f"{ticket.name}: {ticket.source}" for ticket in result.tickets if ticket.source)
    reasons = (f"{ticket.name}: {ticket.reason}" for ticket in result.tickets if ticket.reason)
    return report(
        title=result.scenario,
        facts=(_machine(result, units), _policies(result, units)),
        tables=(
            Table(_TICKETS, tuple(_ticket(each, units) for each in result.tickets), align="lllr"),
            Table(
                _MOMENTS,
                tuple(_moment(each, units) for each in result.moments),
                align="r",
                wrapped=(),
            ),
        ),
        verdict=_verdict(result),
        colour=_COLOURS[result.verdict],
        sections=(
            ("To set", tuple(_settings(result, units))),
            ("Sizes", tuple(sources)),
            ("Notes", (*reasons, *result.notes)),
        ),
        charts=(_chart(result.moments, units),) if plot else (),
    )


def _machine(result: WiredPlan, units: Units) -> str:
    device = result.device
    name = "no device"
    if device is not None:
        name = budget_of(device, units)
    threshold = f"{result.shrink_threshold_percent:g} %"
    cooldown = format_duration(result.shrink_cooldown_ms)
    return f"{name}; {result.mode}; shrinks by {threshold} or more, {cooldown} after a change"


def _policies(result: WiredPlan, units: Units) -> str:
    named = ", ".join(f"{name} ({kind})" for name, kind in result.policies.items())
    return f"policies: {named}; baseline {format_bytes(result.baseline_bytes, units)}"


def _verdict(result: WiredPlan) -> str:
    outcomes = [ticket.outcome for ticket in result.tickets]
    parts = [_VERDICTS[result.verdict]]
    for outcome in ("refused", "waiting", "gave_up", "left_out"):
        if outcome in outcomes:
            parts.append(f"{outcomes.count(outcome)} {_OUTCOMES[outcome]}")
    if result.refused_limits:
        noun = "limit" if result.refused_limits == 1 else "limits"
        parts.append(f"{result.refused_limits} {noun} refused by MLX")
    if changes := len(result.refused_changes_ms):
        noun = "change" if changes == 1 else "changes"
        parts.append(f"{changes} {noun} of the configuration while tickets run")
    if result.longest_wait_ms:
        parts.append(f"longest wait {format_duration(result.longest_wait_ms)}")
    return "; ".join(parts) + "."


def _settings(result: WiredPlan, units: Units) -> Iterator[str]:
    yield (
        f"largest limit: {format_bytes(result.largest_limit_bytes, units)}"
        f" at {format_duration(result.largest_limit_at_ms)};"
        f" largest demand {format_bytes(result.largest_demand_bytes, units)}"
    )
    if result.mode == "wired" and result.device is not None:
        yield _sysctl(result, result.device.working_set_bytes, units)


def _sysctl(result: WiredPlan, working_set: int, units: Units) -> str:
    if result.sysctl_mebibytes is not None:
        left = format_limit(result.left_for_system_bytes or 0, units)
        return (
            f"sudo sysctl iogpu.wired_limit_mb={result.sysctl_mebibytes}, which leaves {left} for"
            " macOS and other processes"
        )
    if result.largest_limit_bytes > working_set:
        return "iogpu.wired_limit_mb: no value is enough; the limit is not below the whole memory"
    size = format_limit(working_set, units)
    return f"iogpu.wired_limit_mb: the default is enough, {size}"


def _ticket(ticket: TicketPlan, units: Units) -> tuple[str, ...]:
    times = (ticket.asked_ms, ticket.waited_ms, ticket.started_ms, ticket.ended_ms)
    shown = ("-" if time is None else format_duration(time) for time in times)
    size = format_bytes(ticket.size_bytes, units)
    return ticket.name, ticket.kind, _OUTCOMES[ticket.outcome], size, *shown


def _moment(moment: WiredMoment, units: Units) -> tuple[str, ...]:
    amounts = (moment.limit_bytes, moment.wanted_bytes, moment.demand_bytes, moment.waiting_bytes)
    counts = (moment.active, moment.reserved, moment.waiting)
    sizes = (format_bytes(amount, units) for amount in amounts)
    return format_duration(moment.at_ms), *sizes, *map(str, counts)


def _chart(moments: Sequence[WiredMoment], units: Units) -> BarChart:
    """Held and waiting bytes over time, with the limit as a line."""
    bars = [
        Bar(
            format_duration(moment.at_ms),
            (moment.demand_bytes, 0, moment.waiting_bytes),
            moment.limit_bytes or None,
            f"of {format_bytes(moment.limit_bytes, units)}",
        )
        for moment in thinned(moments, MOST_ROWS)
    ]
    kinds = ("held", "", "waiting")
    title = "Demand over time"
    if len(bars) < len(moments):
        title += f": {len(bars)} of {len(moments)} moments, each the largest of its span"
    return BarChart(title=title, kinds=kinds, bars=bars, units=units, limit="limit")


def thinned(moments: Sequence[WiredMoment], most: int) -> tuple[WiredMoment, ...]:
    """Return at most ``most`` moments: of each equal span of time the one with the most demand.

    Held and waiting bytes both count, so that the plot shows every peak of either.
    """
    if len(moments) <= most:
        return tuple(moments)
    first, last = moments[0].at_ms, moments[-1].at_ms
    spans: dict[int, WiredMoment] = {}
    for moment in moments:
        span = (moment.at_ms - first) * most // (last - first + 1)
        kept = spans.get(span)
        if kept is None or _total(moment) > _total(kept):
            spans[span] = moment
    return tuple(spans.values())


def _total(moment: WiredMoment) -> int:
    return moment.demand_bytes + moment.waiting_bytes
