"""An estimate as a table for the terminal; without colours in a pipe or a file."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.cli.render import text as estimate_text
from memfit.cli.render.document import VERDICT_COLOURS
from memfit.cli.render.terminal import open_page
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import Estimate, Plots

_WIDEST_BAR = 24
_NARROWEST_BAR = 4
_NARROWEST_NAME = 14
_GAPS = 12  # between five columns
_LEAST_WIDTH = 64  # a narrower terminal wraps lines; numbers are not cut


def to_table(
    result: Estimate,
    units: Units,
    plots: Plots | None,
    explanation: tuple[str, ...],
    *,
    to_file: bool,
) -> str:
    """Return the table as text, with colour codes only for a terminal that supports them."""
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    console, ascii_only = page.console, page.ascii_only
    _draw(console, result, units, ascii_only=ascii_only)
    if plots:
        from memfit.cli.render.plot import drawn

        budget = result.device.working_set_bytes if result.device else None
        for plotted in drawn(plots, budget, units, console.width, ascii_only=ascii_only):
            console.print()
            for line in plotted:
                console.print(line, no_wrap=True, crop=True)
    if explanation:
        console.print()
        for line in explanation:
            console.print(line, soft_wrap=True)
    return page.text()


def _draw(console: Console, result: Estimate, units: Units, *, ascii_only: bool) -> None:
    console.print(Text(result.model.id, style="bold"))
    for line in estimate_text.summary(result, units):
        console.print(line, style="dim")
    console.print(_component_table(result, units, console.width, ascii_only=ascii_only))
    console.print(
        Text(estimate_text.verdict(result, units), style=f"bold {VERDICT_COLOURS[result.verdict]}")
    )
    notes = (*result.assumptions, *(note.message for note in result.notes))
    _section(console, "Recommended", result.recommendation.reasons)
    _section(console, "Notes", notes)


def _section(console: Console, heading: str, lines: tuple[str, ...]) -> None:
    if lines:
        console.print(f"\n{heading}")
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _component_table(result: Estimate, units: Units, width: int, *, ascii_only: bool) -> Table:
    budget = result.device.working_set_bytes if result.device else None
    whole = max(budget or 0, result.peak_bytes, 1)
    cells = list(_cells(result, units, budget))
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    headings = ("Component", "Size", "Of budget" if budget else "Of peak", "Basis")
    widths = [max(size, len(heading)) for size, heading in zip(widths, headings, strict=True)]
    # Numbers keep their width: first the bar shrinks, then the name.
    room = width - sum(widths[1:]) - _GAPS
    bar_width = max(_NARROWEST_BAR, min(_WIDEST_BAR, room - widths[0]))
    name_width = max(_NARROWEST_NAME, min(widths[0], room - bar_width))
    table = Table(box=box.ASCII if ascii_only else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(headings[0], overflow="ellipsis", no_wrap=True, width=name_width)
    table.add_column(headings[1], justify="right", no_wrap=True, width=widths[1])
    table.add_column("", no_wrap=True, width=bar_width)
    table.add_column(headings[2], justify="right", no_wrap=True, width=widths[2])
    table.add_column(headings[3], no_wrap=True, width=widths[3])
    sizes = _sizes(result)
    for (name, size, share, basis), nbytes in zip(cells, sizes, strict=True):
        filled = -(-bar_width * nbytes // whole)
        bar = ("#" if ascii_only else "█") * filled
        style = "dim" if name.startswith(" ") else None
        table.add_row(name, size, bar, share, basis, style=style)
    return table


def _cells(
    result: Estimate, units: Units, budget: int | None
) -> Iterator[tuple[str, str, str, str]]:
    """The texts of each row: name, size, share and basis."""
    whole = budget or max(result.peak_bytes, 1)
    for name, nbytes, basis in estimate_text.rows(result):
        yield name, format_bytes(nbytes, units), estimate_text.percent(nbytes, whole), basis
        if name == "Weights":
            for part, part_bytes in estimate_text.weight_rows(result):
                yield f"  {part}", format_bytes(part_bytes, units), "", ""
    peak = result.peak_bytes
    share = estimate_text.percent(peak, whole)
    yield f"Peak, in {result.peak_phase}", format_bytes(peak, units), share, ""
    yield "Margin", format_bytes(result.components.margin.bytes, units), "", ""


def _sizes(result: Estimate) -> Iterator[int]:
    """The bytes of each row's bar; parts of a component have no bar."""
    for name, nbytes, _ in estimate_text.rows(result):
        yield nbytes
        if name == "Weights":
            yield from (0 for _ in estimate_text.weight_rows(result))
    yield from (result.peak_bytes, 0)
