"""Stacked horizontal bars drawn with characters, with one common limit."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memfit.cli.render.document import Chart
from memfit.estimators.base.units import Units, format_bytes

_UNICODE = ("█", "▓", "░", "│")
_ASCII = ("#", "=", ".", "|")
_LEAST_WIDTH = 20


class Bar(NamedTuple):
    """One bar: bytes of up to three kinds, and a note between its label and the bar."""

    label: str
    parts: tuple[int, ...]
    note: str = ""


def bar_chart(
    title: str,
    kinds: Sequence[str],
    bars: Sequence[Bar],
    units: Units,
    limit: tuple[str, int | None] = ("", None),
) -> Chart:
    """Return a chart of the bars to scale; ``limit`` is a name and bytes, drawn as a line."""

    def draw(width: int, ascii_only: bool) -> Iterator[str]:
        marks = _ASCII if ascii_only else _UNICODE
        return _bar_lines(title, kinds, bars, units, limit, width, marks)

    return draw


def _bar_lines(
    title: str,
    kinds: Sequence[str],
    bars: Sequence[Bar],
    units: Units,
    limit: tuple[str, int | None],
    width: int,
    marks: Sequence[str],
) -> Iterator[str]:
    name, nbytes = limit
    legend = "  ".join(f"{mark} {kind}" for mark, kind in zip(marks, kinds, strict=False))
    line = "" if nbytes is None else f"  {marks[-1]} {name} {format_bytes(nbytes, units)}"
    yield f"{title}: {legend}{line}"
    sizes = [format_bytes(sum(bar.parts), units) for bar in bars]
    columns = [[bar.label for bar in bars], sizes, [bar.note for bar in bars]]
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    labels = [" ".join(cells) for cells in zip(*aligned, strict=True)]
    room = max(_LEAST_WIDTH, width - max(map(len, labels)) - 2)
    whole = max(1, nbytes or 1, *(sum(bar.parts) for bar in bars))
    for label, bar in zip(labels, bars, strict=True):
        drawn = _drawn(bar.parts, whole, room, marks)
        if nbytes is not None:
            at = min(room - 1, nbytes * room // whole)
            drawn = f"{drawn[:at]}{marks[-1]}{drawn[at + 1 :]}"
        yield f"{label} {drawn}".rstrip()


def _drawn(parts: Sequence[int], whole: int, room: int, marks: Sequence[str]) -> str:
    bar, end = "", 0
    for nbytes, mark in zip(parts, marks, strict=False):
        end += nbytes
        bar += mark * (min(room, end * room // whole) - len(bar))
    return bar.ljust(room)
