"""A comparison as tables for the terminal; each has as many models as the width allows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from memfit.cli.render import text as estimate_text
from memfit.cli.render.compare import runtimes
from memfit.cli.render.compare import text as compare_text
from memfit.cli.render.terminal import Page, open_page
from memfit.estimators.base.units import Units
from memfit.estimators.results.comparison import Comparison, Matrix

_LEAST_WIDTH = 64
_WIDEST_HEADING = 30
_NARROWEST_NAME = 14
_GAP = 3  # between two columns


@dataclass(frozen=True, slots=True)
class _Column:
    """A heading and a text for each row."""

    heading: str
    lines: list[str]

    @property
    def least_width(self) -> int:
        return max(map(len, self.lines))

    @property
    def width(self) -> int:
        return max(self.least_width, min(len(self.heading), _WIDEST_HEADING))


def to_table(result: Comparison, units: Units, *, by_runtime: bool, to_file: bool) -> str:
    """Return the tables as text; numbers are never cut, long names are.

    ``by_runtime``: the models are one under several runtimes.
    """
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    described = next((model.model for model in result.models if model.model), None)
    if by_runtime and described:
        page.console.print(estimate_text.title(described), soft_wrap=True)
    for number, model in enumerate(() if by_runtime else result.models, 1):
        page.console.print(f"{number} {model.label}: {compare_text.title(model)}", soft_wrap=True)
    for line in (compare_text.task(result), estimate_text.machine(result, units)):
        page.console.print(line, style="dim", soft_wrap=True)
    if by_runtime:
        runtimes.draw(page, result, units)
    else:
        _draw_figures(page, result, units)
    _list(page, compare_text.notes(result))
    if result.matrix:
        page.console.print()
        _draw_matrix(page, result, result.matrix, units)
    return page.text()


def _draw_figures(page: Page, result: Comparison, units: Units) -> None:
    names = _Column("", ["Verdict", *(compare_text.figure_name(f.name) for f in result.figures)])
    minus = "-" if page.ascii_only else "−"
    first, *others = (
        _Column(heading, _aligned(_rows(result, index, units, minus)))
        for index, heading in enumerate(_headings(result))
    )
    taken = max((first.least_width + _GAP + other.least_width for other in others), default=0)
    room = max(_NARROWEST_NAME, page.console.width - taken - 3 * _GAP)
    names = _Column("", [_cut(name, room, page) for name in names.lines])
    # Every block repeats the first model, because the others are compared with it.
    _draw(page, [names, first], others)


def _rows(result: Comparison, index: int, units: Units, minus: str) -> list[tuple[str, ...]]:
    """One model's value, difference and percent of each figure, the verdict above them."""
    verdict = compare_text.verdict_text(result.models[index], result)
    rows: list[tuple[str, ...]] = [(verdict, "", "")]
    for figure in result.figures:
        value = figure.values[index]
        changes = (
            compare_text.difference_texts(value, figure.unit, units, minus) if index else ("", "")
        )
        rows.append((compare_text.figure_text(figure, index, result, units), *changes))
    return rows


def _draw_matrix(page: Page, result: Comparison, matrix: Matrix, units: Units) -> None:
    notes = compare_text.Footnotes()
    models = len(result.models)
    combinations = [cell.settings for cell in matrix.cells[::models]]
    axes = [
        _Column(name, _aligned([(compare_text.setting_text(c[name]),) for c in combinations]))
        for name in matrix.axes
    ]
    columns = []
    for index, heading in enumerate(_headings(result)):
        texts = [
            compare_text.cell_texts(cell, units, notes) for cell in matrix.cells[index::models]
        ]
        columns.append(_Column(heading, _aligned(texts, ends="<")))
    _draw(page, axes, columns)
    page.console.print(compare_text.tally(matrix))
    _list(page, notes.lines())


def _draw(page: Page, fixed: Sequence[_Column], columns: Sequence[_Column]) -> None:
    """Draw tables of the fixed columns and as many others as fit, at least one."""
    style = box.ASCII if page.ascii_only else box.SIMPLE_HEAD
    for block in _blocks(fixed, columns, page.console.width):
        shown = [*fixed, *block]
        widths = [column.width for column in shown]
        if _span(widths) > page.console.width:
            widths = [max(column.least_width, len(column.heading[:1])) for column in shown]
        page.console.width = max(page.console.width, _span(widths))
        table = Table(box=style, pad_edge=False, show_edge=False)
        for column, width in zip(shown, widths, strict=True):
            table.add_column(_cut(column.heading, width, page), no_wrap=True, width=width)
        for cells in zip(*(column.lines for column in shown), strict=True):
            table.add_row(*cells, style="dim" if cells[0].startswith("  ") else None)
        page.console.print(table)


def _blocks(
    fixed: Sequence[_Column], columns: Sequence[_Column], width: int
) -> Iterator[list[_Column]]:
    block: list[_Column] = []
    for column in columns:
        widths = [shown.width for shown in (*fixed, *block, column)]
        if block and _span(widths) > width:
            yield block
            block = []
        block.append(column)
    yield block


def _span(widths: Sequence[int]) -> int:
    return sum(width + _GAP for width in widths)


def _headings(result: Comparison) -> Iterator[str]:
    """Each model's number, and its name without the common parent directories."""
    paths = [model.label.split("/") for model in result.models]
    common = 0
    while len({tuple(path[: common + 1]) for path in paths}) == 1 and common + 1 < len(paths[0]):
        common += 1
    for number, path in enumerate(paths, 1):
        yield f"{number} {'/'.join(path[common:])}"


def _cut(text: str, width: int, page: Page) -> str:
    if len(text) <= width:
        return text
    mark = "..." if page.ascii_only else "…"
    return (text[: max(0, width - len(mark))] + mark)[:width]


def _aligned(rows: Sequence[tuple[str, ...]], ends: str = ">") -> list[str]:
    """The texts of each row in columns of equal width; inner columns are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [ends, *[">"] * (len(widths) - 2), ends][: len(widths)]
    return [
        "  ".join(
            f"{text:{side}{width}}"
            for text, side, width in zip(row, sides, widths, strict=True)
            if width
        )
        for row in rows
    ]


def _list(page: Page, lines: Sequence[str]) -> None:
    if lines:
        page.console.print()
    for line in lines:
        page.console.print(f"  {line}", soft_wrap=True)
