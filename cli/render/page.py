"""Text and tables drawn for the terminal; styles only when standard output is a terminal."""

import io
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from memfit.cli.render.document import Cell, Column, Columns, Table
from memfit.cli.render.output import visible

# One character for one, so that columns stay aligned.
_ASCII = str.maketrans("±…−", "~~-")
_UNIT = re.compile(r"(?<=[0-9]) (?=[A-Za-z%])")
_NO_BREAK = "\ue000"  # a private-use character, in no text
_LEAST_COLUMNS = 60  # below it numbers would be cut
_USUAL_LINES = 24
_MAX_COLUMNS = 1000  # COLUMNS may be any number; no screen has more


class Page(Struct, frozen=True):
    """A buffered console."""

    console: Console
    ascii_only: bool
    """Whether the terminal's encoding lacks Unicode."""
    height: int
    """Lines of the screen; parts that need room stay within them."""
    _buffer: io.StringIO

    def say(self, text: str, *, style: str = "", indent: int = 0, end: str = "\n") -> None:
        """Draw a sentence, wrapped between words; a number and its unit stay together."""
        space = " " * indent
        lines = textwrap.wrap(
            _UNIT.sub(_NO_BREAK, visible(text)),
            self.console.width,
            initial_indent=space,
            subsequent_indent=space,
            break_on_hyphens=False,
        )
        for line in lines or [""]:
            self.console.print(line.replace(_NO_BREAK, " "), style=style, soft_wrap=True, end=end)

    @property
    def lines(self) -> int:
        """How many lines were drawn so far."""
        return self._buffer.getvalue().count("\n")

    def take_back(self, length: int) -> None:
        """Remove everything that was drawn after the first characters."""
        self._buffer.seek(length)
        self._buffer.truncate()

    @property
    def length(self) -> int:
        """How many characters were drawn so far."""
        return self._buffer.tell()

    def text(self) -> str:
        """Return the text drawn so far, without trailing spaces."""
        lines = self._buffer.getvalue().split("\n")
        text = "\n".join(line.rstrip(" ") for line in lines)
        return text.translate(_ASCII) if self.ascii_only else text


def open_page(*, to_file: bool) -> Page:
    """Return a page as wide as the terminal, within reason."""
    terminal = Console(file=sys.stdout)
    buffer = io.StringIO()
    styled = terminal.is_terminal and not to_file
    console = Console(
        file=buffer,
        width=max(min(terminal.width, _MAX_COLUMNS), _LEAST_COLUMNS),
        force_terminal=styled,
        color_system=terminal.color_system if styled else None,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    ascii_only = not (terminal.encoding or "").lower().startswith("utf") and not to_file
    height = terminal.height if terminal.is_terminal else _USUAL_LINES
    return Page(console, ascii_only, max(height - 1, _USUAL_LINES), buffer)


_GAP = 3  # between two columns
_NARROW_GAP = 2
_LEAST_NAME = 12
_BAR_WIDTHS = (4, 24)
_WIDEST_HEADING = 30
_NARROWEST_NAME = 14
_JUSTIFY: dict[str, Literal["left", "right"]] = {"l": "left", "r": "right", "b": "left"}


def draw_table(page: Page, table: Table) -> None:
    """Draw a table.

    On a narrow terminal the bars and the gaps shrink and the wrapped columns wrap. Then columns
    that may be dropped are; what still does not fit is drawn in blocks that repeat the columns that
    name a row, or the first alone where they are too wide.
    """
    if table.title:
        page.say(table.title)
    headings = [visible(heading) for heading in table.headings]
    rows = [[_text(cell) for cell in row] for row in table.rows]
    widths = [max(1, *map(len, column)) for column in zip(headings, *rows, strict=True)]
    for index in range(len(headings)):
        if table.aligned(index) == "b":
            widths[index] = _bar_width(widths, index, page.console.width)
            for cells, row in zip(rows, table.rows, strict=True):
                cells[index] = bar(
                    row[index], table.whole, widths[index], ascii_only=page.ascii_only
                )
    shown, dropped = _kept(table, widths, page.console.width)
    for number, block in enumerate(_table_blocks(table, widths, shown, page.console.width)):
        if number:
            page.console.print()
        _draw_block(page, table, headings, rows, block)
    if dropped:
        names = ", ".join(headings[index] for index in sorted(dropped))
        page.say(f"not shown on a narrow terminal: {names}", style="dim")


def _bar_width(widths: Sequence[int], index: int, most: int) -> int:
    room = most - _span([*widths[:index], 0, *widths[index + 1 :]], _GAP)
    return max(_BAR_WIDTHS[0], min(_BAR_WIDTHS[1], room))


class _Block(NamedTuple):
    """Columns that are drawn side by side."""

    columns: list[int]
    widths: list[int]
    gap: int


def _kept(table: Table, widths: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """The columns that are shown, and those that are dropped because nothing else fits."""
    shown, dropped = list(range(len(widths))), []
    for index in table.droppable:
        if _fitted([widths[each] for each in shown], _wrapped(table, shown), most):
            break
        shown.remove(index)
        dropped.append(index)
    return shown, dropped


def _table_blocks(
    table: Table, widths: Sequence[int], shown: Sequence[int], most: int
) -> Iterator[_Block]:
    """The blocks that a table is drawn in; mostly one."""
    rest, keys = list(shown), table.keys
    if not all(_block(table, widths, [*rest[:keys], index], most) for index in rest[keys:]):
        keys = 1
    while rest:
        columns = rest[:keys]
        best = _block(table, widths, columns, most)
        for index in rest[keys:]:
            wider = _block(table, widths, [*columns, index], most)
            if wider is None and len(columns) > keys:
                break
            columns.append(index)
            best = wider
        yield best or _squeezed(table, widths, columns, most)
        taken = len(columns)
        rest = [*rest[:keys], *rest[taken:]] if taken < len(rest) else []


def _block(table: Table, widths: Sequence[int], columns: Sequence[int], most: int) -> _Block | None:
    fitted = _fitted([widths[index] for index in columns], _wrapped(table, columns), most)
    return _Block(list(columns), *fitted) if fitted else None


def _squeezed(table: Table, widths: Sequence[int], columns: Sequence[int], most: int) -> _Block:
    """Two columns that do not fit: the first takes what the other leaves, and wraps."""
    *_, last = chosen = [widths[index] for index in columns]
    chosen[0] = max(1, min(chosen[0], most - last - _NARROW_GAP))
    return _Block(list(columns), chosen, _NARROW_GAP)


def _wrapped(table: Table, columns: Sequence[int]) -> list[int]:
    return [place for place, index in enumerate(columns) if index in table.wrapped]


def _draw_block(
    page: Page, table: Table, headings: Sequence[str], rows: Sequence[Sequence[str]], block: _Block
) -> None:
    grid = _grid(page, block.gap)
    for index, width in zip(block.columns, block.widths, strict=True):
        grid.add_column(
            headings[index],
            justify=_JUSTIFY[table.aligned(index)],
            no_wrap=index not in table.wrapped and len(headings[index]) <= width,
            overflow="fold",
            width=width,
        )
    styles = [[getattr(cell, "colour", "") for cell in row] for row in table.rows]
    for cells, colours in zip(rows, styles, strict=True):
        texts = [Text(cells[index], style=colours[index]) for index in block.columns]
        grid.add_row(*texts, style="dim" if cells[0].startswith("  ") else None)
    page.console.print(grid)


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
        widths[0] = max(1, min(widths[0], page.console.width - _GAP - _span(widths[1:], _GAP)))
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


def bar(amount: Cell, whole: int, width: int, *, ascii_only: bool) -> str:
    """Return a bar in proportion to the eighth of a character; what is above 0 is seen.

    >>> bar(1, 20, 25, ascii_only=False), bar(9, 25, 25, ascii_only=True)
    ('█▎', '#########')
    """
    assert isinstance(amount, int)
    steps = 1 if ascii_only else 8
    filled = max(amount > 0, (2 * width * steps * amount + whole) // (2 * whole))
    characters, rest = divmod(filled, steps)
    return ("#" if ascii_only else "█") * characters + " ▏▎▍▌▋▊▉"[rest].strip()


def _fitted(
    widths: Sequence[int], wrapped: Sequence[int], most: int
) -> tuple[list[int], int] | None:
    """Return widths and gap that fit, None when there are none."""
    narrowed = list(widths)
    if _span(widths, _GAP) <= most:
        return narrowed, _GAP
    while _span(narrowed, _NARROW_GAP) > most:
        widest = max(wrapped, key=lambda index: narrowed[index], default=None)
        if widest is None or narrowed[widest] <= _LEAST_NAME:
            return None
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
    fixed_width = sum(column.least_width for column in rest) + _GAP * len(rest)
    taken = max((fixed_width + other.least_width for other in others), default=0)
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
