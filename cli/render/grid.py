"""Draw a table of texts on the terminal; numbers are never cut, long names wrap."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from memfit.cli.render.terminal import Page

_GAP = 3  # between two columns
_NARROW_GAP = 2
_LEAST_NAME = 12


def draw(
    page: Page,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    wrapped: Sequence[int] = (0,),
) -> None:
    """Draw a table; the first ``left`` columns are names, the others numbers aligned right.

    On a narrow terminal the gaps shrink and the ``wrapped`` columns wrap. A table that still does
    not fit is drawn at its full width.
    """
    widths = [max(1, *map(len, column)) for column in zip(headings, *rows, strict=True)]
    widths, gap = _fitted(widths, wrapped, page.console.width)
    page.console.width = max(page.console.width, _span(widths, gap))
    style = box.ASCII if page.ascii_only else box.SIMPLE_HEAD
    padding = (0, 1, 0, gap - 2)  # the rule between two columns takes one
    table = Table(box=style, pad_edge=False, show_edge=False, padding=padding)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        side = "left" if index < left else "right"
        table.add_column(
            heading,
            justify=side,  # type: ignore[arg-type]
            no_wrap=index not in wrapped,
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*row)
    page.console.print(table)


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
