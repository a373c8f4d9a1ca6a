"""Limit and demand over time, drawn with characters: one row per moment."""

from collections.abc import Iterator, Sequence

from memfit.cli.render.document import Chart
from memfit.estimators.base.units import Units, format_bytes, format_duration
from memfit.estimators.results.wired import WiredMoment

MOST_ROWS = 30
_UNICODE = ("█", "░", "│")
_ASCII = ("#", ".", "|")
_LEAST_WIDTH = 20


def wired_chart(moments: Sequence[WiredMoment], units: Units) -> Chart:
    """Return a chart, to scale, of held and waiting bytes, with the limit as a line."""

    def draw(width: int, ascii_only: bool) -> Iterator[str]:
        marks = _ASCII if ascii_only else _UNICODE
        return _lines(thinned(moments, MOST_ROWS), units, width, marks)

    return Chart(draw)


def _lines(
    moments: Sequence[WiredMoment], units: Units, width: int, marks: tuple[str, str, str]
) -> Iterator[str]:
    held, waiting, line = marks
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
