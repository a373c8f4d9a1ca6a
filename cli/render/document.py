"""A result as a document of texts, tables and charts, written for the terminal or as Markdown."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memfit.cli.render.escape import escape_markdown
from memfit.cli.render.grid import draw
from memfit.cli.render.terminal import open_page

VERDICT_COLOURS = {"fits": "green", "tight": "yellow", "exceeds": "red", "unknown": "default"}
_LEAST_WIDTH = 64
_MARKDOWN_WIDTH = 80
# Draws into a width in characters; with True, only with ASCII characters.
Chart = Callable[[int, bool], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts; the first ``left`` columns are left-aligned, the others right-aligned."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    left: int = 1


@dataclass(frozen=True, slots=True)
class Document:
    """A title, then facts, tables, the verdict, sections, commands and charts."""

    title: str
    facts: tuple[str, ...]
    tables: tuple[Table, ...]
    verdict: str
    colour: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    """Headings and lines; a section without lines is left out."""
    charts: tuple[Chart, ...] = ()
    commands: tuple[str, ...] = ()
    """Lines to paste into a shell; they are never wrapped."""


def to_terminal(document: Document, *, to_file: bool) -> str:
    """Return the document for the terminal; text wraps, numbers are never cut."""
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    page.console.print(document.title, style="bold", soft_wrap=True)
    for fact in document.facts:
        page.say(fact, style="dim")
    for table in document.tables:
        page.console.print(f"\n{table.title}" if table.title else "")
        wrapped = range(min(table.left, 1))
        draw(page, table.headings, table.rows, left=table.left, wrapped=wrapped)
    page.console.print()
    page.say(document.verdict, style=f"bold {document.colour}")
    for heading, lines in document.sections:
        if lines:
            page.console.print(f"\n{heading}")
        for line in lines:
            page.say(line, indent=2)
    if document.commands:
        page.console.print("\nTo paste")
    for line in document.commands:
        page.console.print(f"  {line}", soft_wrap=True)
    for chart in document.charts:
        page.console.print()
        for line in chart(page.console.width, page.ascii_only):
            page.console.print(line, no_wrap=True, crop=True)
    return page.text()


def to_markdown(document: Document) -> str:
    """Return the document as a Markdown section that ends with a line feed."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield from (
        f"## {escape_markdown(document.title)}",
        "",
        f"**{escape_markdown(document.verdict)}**",
        "",
    )
    yield from (f"- {escape_markdown(fact)}" for fact in document.facts)
    for table in document.tables:
        yield from ("", f"### {escape_markdown(table.title)}", "") if table.title else ("",)
        yield _row(table.headings)
        right = len(table.headings) - table.left
        yield _row(["---"] * table.left + ["---:"] * right, escape=False)
        yield from map(_row, table.rows)
    for heading, lines in document.sections:
        if lines:
            yield from ("", f"### {heading}", "")
            yield from (f"- {escape_markdown(line)}" for line in lines)
    if document.commands:
        yield from ("", "### To paste", "", "```sh", *document.commands, "```")
    for chart in document.charts:
        yield from ("", "```text", *chart(_MARKDOWN_WIDTH, False), "```")


def _row(cells: Sequence[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(map(escape_markdown, cells) if escape else cells)} |"
