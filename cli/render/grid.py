"""Draw tables on the terminal; numbers are never cut, long names wrap or are cut."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from rich import box
from rich.table import Table as Grid

from memfit.cli.render.document import Cell, Column, Columns, Table
from memfit.cli.render.escape import visible
from memfit.cli.render.page import Page

_GAP = 3  # between two columns
_NARROW_GAP = 2
_LEAST_NAME = 12
_BAR_WIDTHS = (4, 24)
_WIDEST_HEADING = 30
_NARROWEST_NAME = 14
_JUSTIFY: dict[str, Literal["left", "right"]] = {"l": "left", "r": "right", "b": "left"}


def draw_table(page: Page, table: Table) -> None:
    """Draw a table.

    On a narrow terminal the bars and the gaps shrink and the wrapped columns wrap. A table that
    still does not fit is drawn at its full width.
    """
    if table.title:
        page.say(table.title, wraps=False)
    headings = [visible(heading) for heading in table.headings]
    rows = [[_text(cell) for cell in row] for row in table.rows]
    widths = [max(1, *map(len, column)) for column in zip(headings, *rows, strict=True)]
    bars = [index for index in range(len(headings)) if table.aligned(index) == "b"]
    for index in bars:
        widths[index] = 0
        room = page.console.width - _span(widths, _GAP)
        least, most = _BAR_WIDTHS
        widths[index] = max(least, min(most, room))
        for cells, row in zip(rows, table.rows, strict=True):
            cells[index] = _bar(row[index], table.whole, widths[index], page)
    widths, gap = _fitted(widths, table.wrapped, page.console.width)
    page.console.width = max(page.console.width, _span(widths, gap))
    grid = _grid(page, gap)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        grid.add_column(
            heading,
            justify=_JUSTIFY[table.aligned(index)],
            no_wrap=index not in table.wrapped,
            overflow="fold",
            width=width,
        )
    _fill(page, grid, rows)


def draw_columns(page: Page, columns: Columns) -> None:
    """Draw blocks of the fixed columns and as many others as fit, at least one."""
    others = [_laid_out(column) for column in columns.others]
    fixed = [_laid_out(column) for column in columns.fixed]
    if columns.fixed[0].is_left:
        fixed[0] = _narrowed(fixed, others, page)
    for block in _blocks(fixed, others, page.console.width):
        shown = [*fixed, *block]
        widths = [column.width for column in shown]
        if _span(widths, _GAP) + _GAP > page.console.width:
            widths = [max(column.least_width, len(column.heading[:1])) for column in shown]
        page.console.width = max(page.console.width, _span(widths, _GAP) + _GAP)
        grid = _grid(page, _GAP)
        for column, width in zip(shown, widths, strict=True):
            grid.add_column(_cut(column.heading, width, page), no_wrap=True, width=width)
        _fill(page, grid, zip(*(column.lines for column in shown), strict=True))


def _grid(page: Page, gap: int) -> Grid:
    style = box.ASCII if page.ascii_only else box.SIMPLE_HEAD
    # The rule between two columns takes one character.
    return Grid(box=style, pad_edge=False, show_edge=False, padding=(0, 1, 0, gap - 2))


def _fill(page: Page, grid: Grid, rows: Iterable[Sequence[str]]) -> None:
    for cells in rows:
        grid.add_row(*cells, style="dim" if cells[0].startswith("  ") else None)
    page.console.print(grid)


def _text(cell: Cell) -> str:
    if isinstance(cell, bool):
        return "ok" if cell else "BROKEN"
    return visible(str(cell))


def _bar(amount: Cell, whole: int, width: int, page: Page) -> str:
    filled = -(-width * int(amount) // whole)
    return ("#" if page.ascii_only else "█") * filled


def _fitted(widths: list[int], wrapped: Sequence[int], most: int) -> tuple[list[int], int]:
    """Return widths and gap that fit, unchanged when nothing fits."""
    if _span(widths, _GAP) <= most:
        return widths, _GAP
    narrowed = list(widths)
    while _span(narrowed, _NARROW_GAP) > most:
        widest = max(wrapped, key=lambda index: narrowed[index], default=None)
        if widest is None or narrowed[widest] <= _LEAST_NAME:
            return widths, _GAP
        narrowed[widest] -= 1
    return narrowed, _NARROW_GAP


def _span(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


class _Lines(NamedTuple):
    """A heading and a text for each row."""

    heading: str
    lines: list[str]

    @property
    def least_width(self) -> int:
        return max(map(len, self.lines))

    @property
    def width(self) -> int:
        return max(self.least_width, min(len(self.heading), _WIDEST_HEADING))


def _laid_out(column: Column) -> _Lines:
    """The parts of each cell in columns of equal width; inner parts are aligned right."""
    cells = [[visible(part) for part in cell] for cell in column.cells]
    widths = [max(map(len, parts)) for parts in zip(*cells, strict=True)]
    ends = "<" if column.is_left else ">"
    sides = [ends, *[">"] * (len(widths) - 2), ends][: len(widths)]
    lines = [
        "  ".join(
            f"{text:{side}{width}}"
            for text, side, width in zip(cell, sides, widths, strict=True)
            if width
        )
        for cell in cells
    ]
    return _Lines(visible(column.heading), lines)


def _narrowed(fixed: Sequence[_Lines], others: Sequence[_Lines], page: Page) -> _Lines:
    """The names, cut so that the other fixed columns and the widest of the others fit."""
    names, *rest = fixed
    kept = sum(column.least_width for column in rest) + _GAP * len(rest)
    taken = max((kept + other.least_width for other in others), default=0)
    room = max(_NARROWEST_NAME, page.console.width - taken - 3 * _GAP)
    return _Lines(names.heading, [_cut(name.rstrip(), room, page) for name in names.lines])


def _blocks(
    fixed: Sequence[_Lines], others: Sequence[_Lines], width: int
) -> Iterator[list[_Lines]]:
    block: list[_Lines] = []
    for column in others:
        widths = [shown.width for shown in (*fixed, *block, column)]
        if block and _span(widths, _GAP) + _GAP > width:
            yield block
            block = []
        block.append(column)
    yield block


def _cut(text: str, width: int, page: Page) -> str:
    if len(text) <= width:
        return text
    mark = "..." if page.ascii_only else "…"
    return (text[: max(0, width - len(mark))] + mark)[:width]
