"""Draw charts with characters. Colours only repeat what a mark or a word says."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from memfit.cli.render.document import (
    BarChart,
    Chart,
    HeatMap,
    RunChart,
    Scatter,
    Table,
    Toned,
    phase_name,
)
from memfit.cli.render.output import visible
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import RunCall

Line = Sequence[Toned | str]
UNICODE_MARKS = ("█", "▓", "░", "│")
"""Three kinds of bytes, and a limit."""
ASCII_MARKS = ("#", "=", ".", "|")
OVER = "over"
_LEAST_WIDTH = 20
_LEAST_LABEL = 8
_MOST_WIDTH = 100
_ROWS = 10
_SEVERAL = "+"
_NO_BREAK = "\ue000"  # a private-use character, in no text
_FILLS = {"green": " ", "yellow": "░", "red": "▓", "default": "·"}
_ASCII_FILLS = {"green": " ", "yellow": "-", "red": "#", "default": "."}


def plot(chart: Chart, width: int, *, ascii_only: bool) -> Iterator[Line]:
    """Yield the lines of a chart, no wider than ``width`` where that leaves room for it."""
    room = min(width, _MOST_WIDTH)
    match chart:
        case BarChart():
            yield from _bars(chart, room, UNICODE_MARKS if not ascii_only else ASCII_MARKS)
        case Scatter():
            yield from _scatter(chart, room, "|" if ascii_only else "│")
        case RunChart():
            yield from ([line] for line in run_lines(chart, width, ascii_only=ascii_only))
        case HeatMap():
            yield from _heat(chart.table, room, _ASCII_FILLS if ascii_only else _FILLS)
        case _:
            assert_never(chart)


def plain(chart: Chart, width: int) -> Iterator[str]:
    """Yield the lines of a chart without colours."""
    return ("".join(map(str, line)) for line in plot(chart, width, ascii_only=False))


def _bars(chart: BarChart, width: int, marks: Sequence[str]) -> Iterator[Line]:
    legend = [f"{mark} {kind}" for mark, kind in zip(marks, chart.kinds, strict=False) if kind]
    if chart.limit:
        legend.append(f"{marks[-1]} {chart.limit}")
    yield from _titled(chart.title, legend, width)
    labels = _labels(chart, width)
    room = max(_LEAST_WIDTH, width - len(labels[0]))
    for bar, label in zip(chart.bars, labels, strict=True):
        if bar.heading:
            yield from _wrapped(bar.heading, width)
        text = stacked_bar(bar.parts, chart.whole, room, marks, bar.limit)
        if not bar.is_over or bar.limit is None:
            yield [f"{label}{text}".rstrip()]
            continue
        at = min(room - 1, bar.limit * room // chart.whole)
        head, word = label[: -len(OVER) - 1], Toned(f"{OVER} ", "red")
        yield [head, word, text[: at + 1], Toned(text[at + 1 :], "red")]


def _titled(title: str, legend: Sequence[str], width: int) -> Iterator[Line]:
    """A title and its legend; a line breaks between the entries of it."""
    entries = (entry.replace(" ", _NO_BREAK) for entry in legend)
    for line in _wrapped(f"{title}: {'  '.join(entries)}", width):
        yield [str(line[0]).replace(_NO_BREAK, " ")]


def _wrapped(text: str, width: int) -> Iterator[Line]:
    for line in textwrap.wrap(text, width, break_on_hyphens=False):
        yield [line]


def _labels(chart: BarChart, width: int) -> list[str]:
    """Label, size, note and whether the limit is exceeded, in columns; long labels are cut."""
    columns = [
        [bar.size_text(chart.units) for bar in chart.bars],
        [bar.note for bar in chart.bars],
        [OVER if bar.is_over else "" for bar in chart.bars],
    ]
    filled = [column for column in columns if any(column)]
    taken = sum(max(map(len, column)) + 1 for column in filled)
    most = max(_LEAST_LABEL, width - taken - _LEAST_WIDTH - 1)
    names = [shortened(visible(bar.label), most) for bar in chart.bars]
    aligned = [
        [cell.rjust(max(map(len, column))) for cell in column] for column in (names, *filled)
    ]
    return [f"{' '.join(cells)} " for cells in zip(*aligned, strict=True)]


def shortened(text: str, most: int) -> str:
    """Return a text, cut where it has more characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


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


def _scatter(chart: Scatter, width: int, edge: str) -> Iterator[Line]:
    span = max(chart.most - chart.least, 1)
    label = f"{chart.highest:.1f} "
    room = max(_LEAST_WIDTH, width - len(label) - 2)
    rows = [[" "] * room for _ in range(_ROWS)]
    for dot in chart.dots:
        row = rows[_ROWS - 1 - int(dot.rate / chart.highest * (_ROWS - 1))]
        column = (dot.nbytes - chart.least) * (room - 1) // span
        row[column] = dot.letter if row[column] in (" ", dot.letter) else _SEVERAL
    yield [f"{chart.title}: letters as above, {_SEVERAL} several"]
    for index, row in enumerate(rows):
        side = label if index == 0 else "0 " if index == _ROWS - 1 else ""
        yield [f"{side:>{len(label)}}{edge}{''.join(row)}".rstrip()]
    left, right = axis_ends(chart.least, chart.most, chart.units)
    yield [f"{'':>{len(label)}} {left}{right:>{room - len(left)}}".rstrip()]


def axis_ends(least: int, most: int, units: Units) -> tuple[str, str]:
    """Return the labels of an axis, in bytes when rounded sizes would be equal."""
    left, right = (format_bytes(end, units, rounding="nearest") for end in (least, most))
    if least == most:
        return left, ""
    return (left, right) if left != right else (f"{least} B", f"{most} B")


def _heat(table: Table, width: int, fills: dict[str, str]) -> Iterator[Line]:
    """Coloured cells; those that do not fit the width are left out, and a line says so."""
    words = {"green": "fits", "yellow": "tight", "red": "does not fit"}
    legend = [f"{fills[colour] * 2} {word}" for colour, word in words.items()]
    yield from _titled(table.title, legend, width)
    label_width = max(len(visible(str(row[0]))) for row in table.rows)
    label_width = min(label_width, max(_LEAST_LABEL, width // 2))
    places = [n for n in range(1, len(table.headings)) if isinstance(table.rows[0][n], Toned)]
    cell_width = 2 + max(
        max(
            len(visible(table.headings[n])),
            *(len(visible(str(row[n]).strip(" "))) for row in table.rows),
        )
        for n in places
    )
    shown = places[: max(1, (width - label_width - 1) // (cell_width + 1))]
    headings = (visible(table.headings[n]).center(cell_width) for n in shown)
    yield [f"{'':{label_width}} {' '.join(headings)}".rstrip()]
    for row in table.rows:
        line: list[Toned | str] = [shortened(visible(str(row[0])), label_width).ljust(label_width)]
        for place in shown:
            cell = row[place]
            colour = getattr(cell, "colour", "default")
            line += [" ", Toned(_filled(str(cell).strip(" "), cell_width, fills[colour]), colour)]
        yield line
    if len(shown) < len(places):
        names = ", ".join(visible(table.headings[n]) for n in places[len(shown) :])
        yield from _wrapped(f"not shown on a narrow terminal: {names}", width)


def _filled(text: str, width: int, fill: str) -> str:
    return f"{fill}{visible(text).center(width - 2)}{fill}"


_LEAST_COLUMNS = 6


class _Marks(NamedTuple):
    full: str
    peak: str
    budget: str
    border: str


_RUN_MARKS = (_Marks("█", "▲", "─", "│"), _Marks("#", "^", "-", "|"))
"""With Unicode, and of ASCII characters."""


def run_lines(chart: RunChart, width: int, *, ascii_only: bool) -> Iterator[str]:
    """Yield the lines of the plot, no wider than ``width`` where that leaves room for columns."""
    marks, run = _RUN_MARKS[ascii_only], chart.run
    floor, top, line = chart.floor, chart.top, chart.line
    levels = [floor + (top - floor) * row // _ROWS for row in range(_ROWS)]
    # A lower level may have the longer label: 900.0 kB below 1.0 MB.
    labels = {level: format_bytes(level, chart.units) for level in (levels[0], levels[-1])}
    margin = max(map(len, labels.values())) + 1
    columns = max(_LEAST_COLUMNS, (width - margin) // len(run) - 1)
    spans = [_columns(call.bytes, columns) for call in run]
    yield chart.title.replace("peak", f"{marks.peak} peak", 1)
    if chart.limit:
        yield chart.limit if line is None else f"{marks.budget} {chart.limit}"
    for level in reversed(levels):
        if line is not None and level == _row_of(line, levels):
            bars = [marks.budget * columns for _ in run]
        else:
            bars = [_bar(values, level, chart.peak, levels, marks) for values in spans]
        yield f"{labels.get(level, ''):>{margin}}{marks.border}{marks.border.join(bars)}".rstrip()
    yield from _axis(run, columns, " " * (margin + 1))


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


def _axis(run: Sequence[RunCall], columns: int, indent: str) -> Iterator[str]:
    """Yield the labels below the calls; when they are too wide, numbers and a legend."""
    labels = [(phase_name(call), f"{call.tokens} at {call.position}") for call in run]
    if all(len(text) <= columns for texts in labels for text in texts):
        for row in zip(*labels, strict=True):
            yield indent + " ".join(text.ljust(columns) for text in row).rstrip()
        return
    numbers = range(1, len(run) + 1)
    yield indent + " ".join(str(number).ljust(columns) for number in numbers).rstrip()
    for number, (name, tokens) in zip(numbers, labels, strict=True):
        yield f"{indent}{number} {name}, {tokens}"
