"""A plan of wired memory in words, the same for every format that people read."""

from memfit.estimators.base.units import Units, format_bytes, format_duration
from memfit.estimators.results.wired import TicketPlan, WiredMoment, WiredPlan

TICKET_HEADINGS = ("Ticket", "Kind", "Size", "Asked", "Waited", "Started", "Ended", "Outcome")
MOMENT_HEADINGS = ("Time", "Limit", "Wanted", "Demand", "Waiting", "Active", "Reserved", "Queue")
_OUTCOMES = {
    "admitted": "admitted",
    "refused": "refused",
    "gave_up": "gave up",
    "waiting": "never admitted",
    "left_out": "left out",
}
_VERDICTS = {
    "holds": "Holds: every ticket starts at once",
    "waits": "Waits: every ticket that stays is admitted",
    "fails": "Fails",
}


def machine(result: WiredPlan, units: Units) -> str:
    """The machine and how its limit moves, in one line."""
    device = result.device
    name = "no device named"
    if device is not None:
        working_set = format_bytes(device.working_set_bytes, units)
        name = f"{device.name}, working set {working_set}"
    threshold = f"{result.shrink_threshold_percent:g} %"
    cooldown = format_duration(result.shrink_cooldown_ms)
    return f"{name}; {result.mode}; shrinks by {threshold} or more, {cooldown} after a change"


def policies(result: WiredPlan, units: Units) -> str:
    """The policies and the baseline, in one line."""
    named = ", ".join(f"{name} ({kind})" for name, kind in result.policies.items())
    return f"policies: {named}; baseline {format_bytes(result.baseline_bytes, units)}"


def verdict(result: WiredPlan) -> str:
    """The answer in one line, with what it rests on."""
    counts = [ticket.outcome for ticket in result.tickets]
    parts = [_VERDICTS[result.verdict]]
    for outcome in ("refused", "waiting", "gave_up", "left_out"):
        if outcome in counts:
            parts.append(f"{counts.count(outcome)} {_OUTCOMES[outcome]}")
    if result.refused_limits:
        noun = "limit" if result.refused_limits == 1 else "limits"
        parts.append(f"{result.refused_limits} {noun} refused by MLX")
    if result.longest_wait_ms:
        parts.append(f"longest wait {format_duration(result.longest_wait_ms)}")
    return "; ".join(parts) + "."


def settings(result: WiredPlan, units: Units) -> list[str]:
    """What to set, with its reason."""
    largest = format_bytes(result.largest_limit_bytes, units)
    at = format_duration(result.largest_limit_at_ms)
    lines = [
        f"largest limit: {largest} at {at};"
        f" largest demand {format_bytes(result.largest_demand_bytes, units)}"
    ]
    if result.mode == "wired" and result.device is not None:
        lines.append(_sysctl(result, result.device.working_set_bytes, units))
    return lines


def _sysctl(result: WiredPlan, working_set: int, units: Units) -> str:
    if result.sysctl_mebibytes is not None:
        left = format_bytes(result.left_for_system_bytes or 0, units)
        return (
            f"sudo sysctl iogpu.wired_limit_mb={result.sysctl_mebibytes}, which leaves {left} for"
            " macOS and all else"
        )
    if result.largest_limit_bytes > working_set:
        return "iogpu.wired_limit_mb: no setting allows it; the limit is not below all memory"
    return f"iogpu.wired_limit_mb: stock is enough, {format_bytes(working_set, units)}"


def notes(result: WiredPlan) -> list[str]:
    """What must be known of tickets that did not start, and of the plan."""
    told = [f"{ticket.name}: {ticket.reason}" for ticket in result.tickets if ticket.reason]
    return [*told, *result.notes]


def ticket_texts(ticket: TicketPlan, units: Units) -> tuple[str, ...]:
    """The cells of a ticket, as `TICKET_HEADINGS`."""
    times = (ticket.asked_ms, ticket.waited_ms, ticket.started_ms, ticket.ended_ms)
    shown = ("-" if time is None else format_duration(time) for time in times)
    size = format_bytes(ticket.size_bytes, units)
    return ticket.name, ticket.kind, size, *shown, _OUTCOMES[ticket.outcome]


def moment_texts(moment: WiredMoment, units: Units) -> tuple[str, ...]:
    """The cells of a moment, as `MOMENT_HEADINGS`."""
    amounts = (moment.limit_bytes, moment.wanted_bytes, moment.demand_bytes, moment.waiting_bytes)
    counts = (moment.active, moment.reserved, moment.waiting)
    sizes = (format_bytes(amount, units) for amount in amounts)
    return format_duration(moment.at_ms), *sizes, *map(str, counts)
