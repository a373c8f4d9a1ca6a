"""Draw memory over the operations of a traced run with characters, call by call.

Each column covers a span of operations. The lowest row is the minimum of the run, the peak is
marked, and the budget is a line.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from memfit.cli.render.document import Chart
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import RunCall

_ROWS = 10
_LEAST_COLUMNS = 6


class _Marks(NamedTuple):
    full: str
    peak: str
    budget: str
    border: str


_UNICODE = _Marks("█", "▲", "─", "│")
_ASCII = _Marks("#", "^", "-", "|")


def run_chart(run: tuple[RunCall, ...], budget: int | None, units: Units) -> Chart:
    """Return the plot."""
    return Chart(
        lambda width, ascii_only: run_lines(run, budget, units, width, ascii_only=ascii_only)
    )


def run_lines(
    run: tuple[RunCall, ...], budget: int | None, units: Units, width: int, *, ascii_only: bool
) -> Iterator[str]:
    """Yield the lines of the plot, no wider than ``width`` where that leaves room for columns."""
    marks = _ASCII if ascii_only else _UNICODE
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
