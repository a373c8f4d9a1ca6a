"""A plan laid out once, as text in tables, and drawn for the terminal or as Markdown."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memfit.cli.render.grid import draw
from memfit.cli.render.terminal import open_page

_LEAST_WIDTH = 64
_MARKDOWN_WIDTH = 80
# Draws into a width in characters, with ASCII marks only where that is asked for.
Plot = Callable[[int, bool], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Grid:
    """Texts in columns: the first column is set left, all others right."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A plan in words: ``facts`` stand below the title, ``verdict`` below the tables.

    Lines ``to_paste`` into a shell are never wrapped.
    """

    title: str
    facts: tuple[str, ...]
    grids: tuple[Grid, ...]
    verdict: str
    colour: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    plots: tuple[Plot, ...] = field(default=())
    to_paste: tuple[str, ...] = ()


def to_table(sheet: Sheet, *, to_file: bool) -> str:
    """Return the sheet for the terminal; numbers are never cut, a narrow terminal wraps."""
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    page.console.print(sheet.title, style="bold", soft_wrap=True)
    for fact in sheet.facts:
        page.say(fact, style="dim")
    for grid in sheet.grids:
        page.console.print(f"\n{grid.title}" if grid.title else "")
        draw(page, grid.headings, grid.rows)
    page.console.print()
    page.say(sheet.verdict, style=f"bold {sheet.colour}")
    for heading, lines in sheet.sections:
        if lines:
            page.console.print(f"\n{heading}")
        for line in lines:
            page.say(line, indent=2)
    if sheet.to_paste:
        page.console.print("\nTo paste")
    for line in sheet.to_paste:
        page.console.print(f"  {line}", soft_wrap=True)
    for plot in sheet.plots:
        page.console.print()
        for line in plot(page.console.width, page.ascii_only):
            page.console.print(line, no_wrap=True, crop=True)
    return page.text()


def to_markdown(sheet: Sheet) -> str:
    """Return the sheet as a Markdown section that ends with a line feed."""
    return "\n".join(_lines(sheet)) + "\n"


def _lines(sheet: Sheet) -> Iterator[str]:
    yield from (f"## {_escaped(sheet.title)}", "", f"**{_escaped(sheet.verdict)}**", "")
    yield from (f"- {_escaped(fact)}" for fact in sheet.facts)
    for grid in sheet.grids:
        yield from ("", f"### {_escaped(grid.title)}", "") if grid.title else ("",)
        yield _row(grid.headings)
        yield _row(["---", *("---:" for _ in grid.headings[1:])], escape=False)
        yield from map(_row, grid.rows)
    for heading, lines in sheet.sections:
        if lines:
            yield from ("", f"### {heading}", "")
            yield from (f"- {_escaped(line)}" for line in lines)
    if sheet.to_paste:
        yield from ("", "### To paste", "", "```sh", *sheet.to_paste, "```")
    for plot in sheet.plots:
        yield from ("", "```text", *plot(_MARKDOWN_WIDTH, False), "```")


def _row(cells: Sequence[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(map(_escaped, cells) if escape else cells)} |"


def _escaped(text: str) -> str:
    for mark in ("\\", "|", "<", "`", "*", "_"):
        text = text.replace(mark, f"\\{mark}")
    return text
