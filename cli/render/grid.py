"""A table of texts for the terminal; no cell is ever cut."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from memfit.cli.render.terminal import Page

_GAP = 3  # between two columns


def draw(
    page: Page, headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> None:
    """Draw a table whose first ``left`` columns are names, the others numbers set right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    page.console.width = max(page.console.width, sum(widths) + _GAP * len(widths))
    style = box.ASCII if page.ascii_only else box.SIMPLE_HEAD
    table = Table(box=style, pad_edge=False, show_edge=False)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        side = "left" if index < left else "right"
        table.add_column(heading, justify=side, no_wrap=True, width=width)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    page.console.print(table)
