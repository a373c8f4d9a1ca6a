"""Stacked horizontal bars drawn with characters, with one common limit."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memfit.cli.render.chart import ASCII_MARKS, LEAST_WIDTH, UNICODE_MARKS, stacked_bar
from memfit.cli.render.document import Chart
from memfit.estimators.base.units import Units, format_bytes


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
        marks = ASCII_MARKS if ascii_only else UNICODE_MARKS
        return _bar_lines(title, kinds, bars, units, limit, width, marks)

    return Chart(draw)


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
    room = max(LEAST_WIDTH, width - max(map(len, labels)) - 2)
    whole = max(1, nbytes or 1, *(sum(bar.parts) for bar in bars))
    for label, bar in zip(labels, bars, strict=True):
        yield f"{label} {stacked_bar(bar.parts, whole, room, marks, nbytes)}".rstrip()
