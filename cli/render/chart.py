"""Charts drawn with characters, each with one scale.

Bars of several kinds of bytes, a scatter of speed against memory, and memory over a run.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from memfit.cli.render.document import Chart
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import CurvePoint, RunCall

UNICODE_MARKS = ("█", "▓", "░", "│")
"""Three kinds of bytes, and a limit."""
ASCII_MARKS = ("#", "=", ".", "|")
MEMORY = ("weights", "caches", "workspace")
_LEAST_WIDTH = 20
_MOST_WIDTH = 100  # of charts with few points
_ROWS = 10


class Bar(NamedTuple):
    """A bar: bytes of up to three kinds, its limit in bytes, and a line above it."""

    label: str
    parts: Sequence[int]
    limit: int | None = None
    heading: str = ""


def bar_chart(
    title: str,
    kinds: Sequence[str],
    bars: Sequence[Bar],
    *,
    limit: str = "",
    has_limit_line: bool = False,
    is_narrow: bool = False,
) -> Chart:
    """Return a chart of the bars to scale; ``limit`` names the limit, in a line of its own or not.

    A kind without a name is not in the legend.
    """
    most = _MOST_WIDTH if is_narrow else None
    between = "\n" if has_limit_line else "  "
    return Chart(
        partial(_bar_lines, title, kinds, bars, limit and between + "{mark} " + limit, most)
    )


def _bar_lines(
    title: str,
    kinds: Sequence[str],
    bars: Sequence[Bar],
    limit: str,
    most: int | None,
    width: int,
    ascii_only: bool,
) -> Iterator[str]:
    marks = ASCII_MARKS if ascii_only else UNICODE_MARKS
    legend = "  ".join(f"{mark} {kind}" for mark, kind in zip(marks, kinds, strict=False) if kind)
    yield from f"{title}: {legend}{limit.replace('{mark}', marks[-1])}".split("\n")
    room = max(_LEAST_WIDTH, min(width, most or width) - max(len(bar.label) for bar in bars) - 1)
    whole = max(1, *(max(sum(bar.parts), bar.limit or 0) for bar in bars))
    for bar in bars:
        if bar.heading:
            yield bar.heading
        yield f"{bar.label}{stacked_bar(bar.parts, whole, room, marks, bar.limit)}".rstrip()


class SizedBar(NamedTuple):
    """A bar that is labelled with its size too, and a note after that."""

    label: str
    parts: Sequence[int]
    note: str = ""


def sized_chart(
    title: str,
    kinds: Sequence[str],
    bars: Sequence[SizedBar],
    units: Units,
    limit: tuple[str, int | None] = ("", None),
) -> Chart:
    """Return a chart of the bars to scale; ``limit`` is a name and bytes."""
    name, nbytes = limit
    sizes = [format_bytes(sum(bar.parts), units) for bar in bars]
    columns = [[bar.label for bar in bars], sizes, [bar.note for bar in bars]]
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    labels = [f"{' '.join(cells)} " for cells in zip(*aligned, strict=True)]
    return bar_chart(
        title,
        kinds,
        [Bar(label, bar.parts, nbytes) for label, bar in zip(labels, bars, strict=True)],
        limit="" if nbytes is None else f"{name} {format_bytes(nbytes, units)}",
    )


def curve_chart(
    curve: Sequence[CurvePoint], budget: int | None, units: Units, *, by: str | None = None
) -> Chart:
    """Return weights, caches and the rest of the peak by context.

    ``by`` names the method of the figures, if it differs from the estimate's.
    """
    bars = [
        Bar(
            f"{point.context_tokens:>8} {format_bytes(point.peak_bytes, units):>10} ",
            (
                point.weights_bytes,
                point.cache_bytes,
                point.peak_bytes - point.weights_bytes - point.cache_bytes,
            ),
            budget or None,
        )
        for point in curve
    ]
    title = f"Memory against context, by {by}" if by else "Memory against context"
    limit = f"working set {format_bytes(budget, units)}" if budget else ""
    return bar_chart(title, MEMORY, bars, limit=limit, has_limit_line=True)


def stacked_bar(
    parts: Sequence[int], whole: int, width: int, marks: Sequence[str], limit: int | None = None
) -> str:
    """Return a bar of parts in bytes, where ``whole`` bytes fill the width; a limit is a line.

    >>> stacked_bar((2, 1, 1), 8, 8, ASCII_MARKS, 6)
    '##=.  |'
    """
    bar, end = "", 0
    for nbytes, mark in zip(parts, marks, strict=False):
        end += nbytes
        bar += mark * (min(width, end * width // whole) - len(bar))
    bar = bar.ljust(width)
    if limit is not None:
        at = min(width - 1, limit * width // whole)
        bar = f"{bar[:at]}{marks[-1]}{bar[at + 1 :]}"
    return bar.rstrip()


class Dot(NamedTuple):
    """A point of a scatter: points with the same settings share a letter."""

    letter: str
    nbytes: int
    rate: float


_SEVERAL = "+"


def speed_chart(phase: str, dots: Sequence[Dot], units: Units) -> Chart:
    """Return tokens per second upwards from zero, memory to the right from least to most."""
    return Chart(partial(_speed, phase, dots, units))


def _speed(
    phase: str, dots: Sequence[Dot], units: Units, width: int, ascii_only: bool
) -> Iterator[str]:
    most = max(dot.rate for dot in dots)
    sizes = [dot.nbytes for dot in dots]
    least, span = min(sizes), max(sizes) - min(sizes)
    label = f"{most:.1f} "
    room = max(_LEAST_WIDTH, min(width, _MOST_WIDTH) - len(label) - 2)
    rows = [[" "] * room for _ in range(_ROWS)]
    for dot in dots:
        row = rows[_ROWS - 1 - int(dot.rate / most * (_ROWS - 1))]
        column = (dot.nbytes - least) * (room - 1) // max(span, 1)
        row[column] = dot.letter if row[column] in (" ", dot.letter) else _SEVERAL
    yield f"{phase}, tokens/s against memory: letters as above, {_SEVERAL} several"
    edge = "|" if ascii_only else "│"
    for index, row in enumerate(rows):
        side = label if index == 0 else "0 " if index == _ROWS - 1 else ""
        yield f"{side:>{len(label)}}{edge}{''.join(row)}".rstrip()
    left, right = axis_ends(least, least + span, units)
    yield f"{'':>{len(label)}} {left}{right:>{room - len(left)}}".rstrip()


def axis_ends(least: int, most: int, units: Units) -> tuple[str, str]:
    """Return the labels of an axis, in bytes when rounded sizes would be equal."""
    left, right = format_bytes(least, units), format_bytes(most, units)
    if least == most:
        return left, ""
    return (left, right) if left != right else (f"{least} B", f"{most} B")


_LEAST_COLUMNS = 6


class _Marks(NamedTuple):
    full: str
    peak: str
    budget: str
    border: str


_RUN_MARKS = (_Marks("█", "▲", "─", "│"), _Marks("#", "^", "-", "|"))
"""With Unicode, and of ASCII characters."""


def run_chart(run: tuple[RunCall, ...], budget: int | None, units: Units) -> Chart:
    """Return the plot."""
    return Chart(
        lambda width, ascii_only: run_lines(run, budget, units, width, ascii_only=ascii_only)
    )


def run_lines(
    run: tuple[RunCall, ...], budget: int | None, units: Units, width: int, *, ascii_only: bool
) -> Iterator[str]:
    """Yield the lines of the plot, no wider than ``width`` where that leaves room for columns."""
    marks = _RUN_MARKS[ascii_only]
    peak = max(max(call.bytes) for call in run)
    floor = min(min(call.bytes) for call in run)
    # A budget far above the run would leave no rows for it: it is printed, not drawn.
    line = budget if budget and budget - floor < 2 * (peak - floor) else None
    top = max(peak, line or 0)
    levels = [floor + (top - floor) * row // _ROWS for row in range(_ROWS)]
    margin = len(format_bytes(top, units)) + 1
    columns = max(_LEAST_COLUMNS, (width - margin) // len(run) - 1)
    spans = [_columns(call.bytes, columns) for call in run]
    yield from _heading(run, peak, budget, units, marks, is_drawn=line is not None)
    for level in reversed(levels):
        label = format_bytes(level, units) if level in (levels[0], levels[-1]) else ""
        if line is not None and level == _row_of(line, levels):
            bars = [marks.budget * columns for _ in run]
        else:
            bars = [_bar(values, level, peak, levels, marks) for values in spans]
        yield f"{label:>{margin}}{marks.border}{marks.border.join(bars)}".rstrip()
    yield from _axis(run, columns, " " * (margin + 1))


def _heading(
    run: tuple[RunCall, ...],
    peak: int,
    budget: int | None,
    units: Units,
    marks: _Marks,
    *,
    is_drawn: bool,
) -> Iterator[str]:
    phase = _name(next(call for call in run if peak in call.bytes))
    yield (
        f"Memory over the operations of a run: {marks.peak} peak {format_bytes(peak, units)}"
        f" in {phase}"
    )
    if budget and is_drawn:
        yield f"{marks.budget} working set {format_bytes(budget, units)}"
    elif budget:
        yield f"working set {format_bytes(budget, units)}, above all of it"


def _columns(values: tuple[int, ...], columns: int) -> list[int]:
    """Return the maximum of the operations in each column; few values are stretched."""
    starts = [len(values) * column // columns for column in range(columns + 1)]
    return [max(values[start : max(start + 1, end)]) for start, end in pairwise(starts)]


def _bar(values: list[int], level: int, peak: int, levels: list[int], marks: _Marks) -> str:
    """Return one row of one call: the columns that reach the level; the peak has its own mark."""
    is_crest = level == _row_of(peak, levels)
    return "".join(
        marks.peak if is_crest and value == peak else marks.full if value >= level else " "
        for value in values
    )


def _row_of(value: int, levels: list[int]) -> int:
    return max((level for level in levels if level <= value), default=levels[0])


def _name(call: RunCall) -> str:
    return call.phase.replace("_", " ")


def _axis(run: tuple[RunCall, ...], columns: int, indent: str) -> Iterator[str]:
    """Yield the labels below the calls; when they are too wide, numbers and a legend."""
    labels = [(_name(call), f"{call.tokens} at {call.position}") for call in run]
    if all(len(text) <= columns for texts in labels for text in texts):
        for row in zip(*labels, strict=True):
            yield indent + " ".join(text.ljust(columns) for text in row).rstrip()
        return
    numbers = range(1, len(run) + 1)
    yield indent + " ".join(str(number).ljust(columns) for number in numbers).rstrip()
    for number, (name, tokens) in zip(numbers, labels, strict=True):
        yield f"{indent}{number} {name}, {tokens}"
