"""Markdown, for a pull request or a page."""

import re
from collections.abc import Iterable, Iterator, Sequence

from memfit.cli.render.document import (
    AnyPart,
    Cell,
    Columns,
    Commands,
    Document,
    HasDocument,
    Heading,
    Pair,
    Sliders,
    Table,
    Text,
    Verdict,
    verdict_first,
)
from memfit.cli.render.output import visible
from memfit.cli.render.plot import plain

_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\|<`*_["})
# GitHub notifies the person named after it; a space without width prevents it.
_MENTION = re.compile(r"(?<![A-Za-z0-9])@(?=[A-Za-z0-9])")
_BULLETS = {"-": "- ", "!": "- ⚠️ "}
_CHART_WIDTH = 80


def write(view: HasDocument, *, to_file: bool) -> str:
    """Return the view's document as Markdown that ends with a line feed."""
    return to_markdown(view.document())


def to_markdown(document: Document) -> str:
    """Return a document as Markdown that ends with a line feed; the verdict follows the title."""
    parts = verdict_first([part for part in document if part.only not in ("terminal", "picture")])
    blocks = ("\n".join(_lines(part)) for part in parts)
    return "\n\n".join(filter(None, blocks)) + "\n"


def escape(text: str) -> str:
    r"""Return a text that Markdown shows as it is, also in a table cell.

    >>> print(escape("a_b [c](d) | <e>"))
    a\_b \[c](d) \| \<e>
    """
    return _MENTION.sub("@&#8203;", visible(text).translate(_MARKS))


def _lines(part: AnyPart) -> Iterator[str]:
    match part:
        case Heading():
            yield _heading(part)
        case Text():
            yield from _text(part)
        case Table():
            yield from _table(part)
        case Columns():
            yield from _columns(part)
        case Verdict() if part.is_title:
            yield f"## {_mark(part.colour == 'green')} {escape(part.text)}"
        case Verdict():
            yield f"**{escape(part.text)}**"
        case Commands():
            if part.lines:
                yield "### To paste\n"
                yield from _fenced("sh", part.lines)
        case Sliders():
            pass
        case _:
            yield from _fenced("text", list(plain(part, _CHART_WIDTH)))


def _heading(heading: Heading) -> str:
    status = f": {escape(heading.status)}" if heading.status else ""
    return f"{'#' * heading.level} {escape(heading.text)}{status}"


def _text(text: Text) -> Iterator[str]:
    if text.lines and text.heading:
        yield f"### {escape(text.heading)}\n"
    lines = [_line(line, is_strong=text.strong) for line in text.lines]
    if text.mark == "1.":
        yield from (f"{number}. {line}" for number, line in enumerate(lines, 1))
    elif text.mark:
        yield from (f"{_BULLETS[text.mark]}{line}" for line in lines)
    else:
        yield "  \n".join(lines)


def _line(line: str | Pair, *, is_strong: bool) -> str:
    if isinstance(line, Pair):
        return f"**{escape(line.problem)}**; {escape(line.remedy)}"
    return f"**{escape(line)}**" if is_strong else escape(line)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield f"### {escape(table.title)}\n"
    yield _row(map(escape, table.headings))
    yield _rule(table.aligned(column) == "r" for column in range(len(table.headings)))
    for number, row in enumerate(table.rows, 1):
        cells = [_cell(cell) for cell in row]
        if table.has_total and number == len(table.rows):
            cells[0] = f"**{cells[0]}**"
        yield _row(cells)


def _columns(columns: Columns) -> Iterator[str]:
    shown = [*columns.fixed, *columns.others]
    yield _row(escape(heading) for column in shown for heading in column.page_headings)
    yield _rule(not column.is_left for column in shown for _ in column.page_headings)
    for cells in zip(*(column.cells for column in shown), strict=True):
        texts: list[str] = []
        for column, parts in zip(shown, cells, strict=True):
            texts += parts if len(column.page_headings) > 1 else [" ".join(filter(None, parts))]
        yield _row(map(escape, texts))


def _cell(cell: Cell) -> str:
    return _mark(cell) if isinstance(cell, bool) else escape(str(cell))


def _mark(is_passed: bool) -> str:
    return "✅" if is_passed else "❌"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(rights: Iterable[bool]) -> str:
    return _row("---:" if right else "---" for right in rights)


def _fenced(language: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield lines as they are; the fence is longer than every run of backticks in them."""
    shown = [visible(line) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}{language}", *shown, fence)
