"""Stacked bars drawn with characters, one a row, against one limit."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memfit.estimators.base.units import Units, format_bytes

_UNICODE = ("█", "▓", "░", "│")
_ASCII = ("#", "=", ".", "|")
_LEAST_WIDTH = 20


class Bar(NamedTuple):
    """A label, bytes of up to three kinds, and a remark that stands before the bar."""

    label: str
    parts: tuple[int, ...]
    remark: str = ""


def bar_lines(
    title: str,
    kinds: Sequence[str],
    bars: Sequence[Bar],
    limit: tuple[str, int] | None,
    units: Units,
    width: int,
    *,
    ascii_only: bool,
) -> Iterator[str]:
    """Yield the lines of a plot: the bars to scale, and the limit as a line through them."""
    marks = _ASCII if ascii_only else _UNICODE
    legend = "  ".join(f"{mark} {kind}" for mark, kind in zip(marks, kinds, strict=False))
    line = f"  {marks[-1]} {limit[0]} {format_bytes(limit[1], units)}" if limit else ""
    yield f"{title}: {legend}{line}"
    names = max(len(bar.label) for bar in bars)
    remarks = max(len(bar.remark) for bar in bars)
    sizes = [format_bytes(sum(bar.parts), units) for bar in bars]
    labels = [
        f"{bar.label:>{names}} {size:>{max(map(len, sizes))}} {bar.remark:>{remarks}}"
        for bar, size in zip(bars, sizes, strict=True)
    ]
    room = max(_LEAST_WIDTH, width - max(map(len, labels)) - 2)
    whole = max(1, limit[1] if limit else 1, *(sum(bar.parts) for bar in bars))
    for label, bar in zip(labels, bars, strict=True):
        drawn = _drawn(bar.parts, whole, room, marks)
        if limit:
            at = min(room - 1, limit[1] * room // whole)
            drawn = f"{drawn[:at]}{marks[-1]}{drawn[at + 1 :]}"
        yield f"{label} {drawn}".rstrip()


def _drawn(parts: Sequence[int], whole: int, room: int, marks: Sequence[str]) -> str:
    bar, end = "", 0
    for nbytes, mark in zip(parts, marks, strict=False):
        end += nbytes
        bar += mark * (min(room, end * room // whole) - len(bar))
    return bar.ljust(room)
