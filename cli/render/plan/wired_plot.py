"""Limit and demand over time, drawn with characters: one row a moment, the limit as a line."""

from collections.abc import Iterator, Sequence

from memfit.estimators.base.units import Units, format_bytes, format_duration
from memfit.estimators.plans.wired.result import Moment

MOST_ROWS = 30
_UNICODE = ("█", "░", "│")
_ASCII = ("#", ".", "|")
_LEAST_WIDTH = 20


def plot_lines(
    moments: Sequence[Moment], units: Units, width: int, *, ascii_only: bool
) -> Iterator[str]:
    """Yield the lines of the plot: what is held, what waits for room, and the limit, to scale."""
    held, waiting, line = _ASCII if ascii_only else _UNICODE
    times = [format_duration(moment.at_ms) for moment in moments]
    limits = [format_bytes(moment.limit_bytes, units) for moment in moments]
    label = max(map(len, times)) + max(map(len, limits)) + 3
    room = max(_LEAST_WIDTH, width - label - 1)
    whole = max(1, *(max(m.demand_bytes + m.waiting_bytes, m.limit_bytes) for m in moments))
    yield f"Demand over time: {held} held  {waiting} waiting  {line} limit, as written"
    for moment, time, limit in zip(moments, times, limits, strict=True):
        ends = moment.demand_bytes * room // whole
        bar = held * ends
        bar += waiting * ((moment.demand_bytes + moment.waiting_bytes) * room // whole - ends)
        at = min(room - 1, moment.limit_bytes * room // whole)
        bar = bar.ljust(room)
        bar = f"{bar[:at]}{line}{bar[at + 1 :]}".rstrip()
        yield f"{time:>{max(map(len, times))}}  {limit:>{max(map(len, limits))}} {bar}"
