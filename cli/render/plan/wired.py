"""A plan of wired memory as tables for the terminal, and as Markdown."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.padding import Padding
from rich.table import Table

from memfit.cli.render.plan import wired_words as words
from memfit.cli.render.plan.wired_plot import MOST_ROWS, plot_lines, thinned
from memfit.cli.render.terminal import Page, open_page
from memfit.estimators.base.units import Units
from memfit.estimators.results.wired import WiredPlan

_COLOURS = {"holds": "green", "waits": "yellow", "fails": "red"}
_GAP = 3  # between two columns
_LEAST_WIDTH = 64
_MARKDOWN_WIDTH = 80
_WORDS = frozenset(("Ticket", "Kind", "Outcome"))  # all other columns are numbers


def to_table(result: WiredPlan, units: Units, *, plot: bool, to_file: bool) -> str:
    """Return the plan as text; numbers are never cut, so that a narrow terminal wraps."""
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    page.console.print(result.scenario, style="bold")
    for line in (words.machine(result, units), words.policies(result, units)):
        page.console.print(line, style="dim", soft_wrap=True)
    tickets = [words.ticket_texts(ticket, units) for ticket in result.tickets]
    moments = [words.moment_texts(moment, units) for moment in result.moments]
    _draw(page, words.TICKET_HEADINGS, tickets)
    page.console.print()
    _draw(page, words.MOMENT_HEADINGS, moments)
    page.console.print(words.verdict(result), style=f"bold {_COLOURS[result.verdict]}")
    _section(page, "To set", words.settings(result, units))
    _section(page, "Notes", words.notes(result))
    if plot:
        page.console.print()
        for line in _plot(result, units, page.console.width, ascii_only=page.ascii_only):
            page.console.print(line, no_wrap=True, crop=True)
    return page.text()


def to_markdown(result: WiredPlan, units: Units, *, plot: bool) -> str:
    """Return the plan as a Markdown section that ends with a line feed."""
    return "\n".join(_markdown(result, units, plot=plot)) + "\n"


def _draw(page: Page, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    style = box.ASCII if page.ascii_only else box.SIMPLE_HEAD
    table = Table(box=style, pad_edge=False, show_edge=False)
    span = 0
    for index, heading in enumerate(headings):
        width = max(len(heading), *(len(row[index]) for row in rows))
        span += width + _GAP
        side = "left" if heading in _WORDS else "right"
        table.add_column(heading, justify=side, no_wrap=True, width=width)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    page.console.width = max(page.console.width, span)
    page.console.print(table)


def _section(page: Page, heading: str, lines: Sequence[str]) -> None:
    if lines:
        page.console.print(f"\n{heading}")
    for line in lines:
        page.console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _plot(result: WiredPlan, units: Units, width: int, *, ascii_only: bool) -> Iterator[str]:
    yield from plot_lines(thinned(result.moments, MOST_ROWS), units, width, ascii_only=ascii_only)


def _markdown(result: WiredPlan, units: Units, *, plot: bool) -> Iterator[str]:
    yield from (f"## {_escaped(result.scenario)}", "", f"**{_escaped(words.verdict(result))}**", "")
    for line in (words.machine(result, units), words.policies(result, units)):
        yield f"- {_escaped(line)}"
    yield ""
    tickets = [words.ticket_texts(ticket, units) for ticket in result.tickets]
    yield from _markdown_table(words.TICKET_HEADINGS, tickets)
    yield ""
    moments = [words.moment_texts(moment, units) for moment in result.moments]
    yield from _markdown_table(words.MOMENT_HEADINGS, moments)
    for heading, lines in (
        ("To set", words.settings(result, units)),
        ("Notes", words.notes(result)),
    ):
        if lines:
            yield from ("", f"### {heading}", "")
            yield from (f"- {_escaped(line)}" for line in lines)
    if plot:
        plotted = _plot(result, units, _MARKDOWN_WIDTH, ascii_only=False)
        yield from ("", "```text", *plotted, "```")


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'|'.join('---' if heading in _WORDS else '---:' for heading in headings)}|"
    yield from (f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _escaped(text: str) -> str:
    for mark in ("\\", "|", "<", "`", "*", "_"):
        text = text.replace(mark, f"\\{mark}")
    return text
