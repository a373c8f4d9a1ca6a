"""A comparison as a document, and as rows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from memfit.cli.render.chart import NEEDED, needed_bar, working_set
from memfit.cli.render.document import (
    VERDICT_COLOURS,
    BarChart,
    Chart,
    Column,
    Columns,
    Document,
    Heading,
    HeatMap,
    Table,
    Text,
    Toned,
    section,
)
from memfit.cli.render.view import view
from memfit.cli.render.views import compare_text
from memfit.cli.render.views import text as estimate_text
from memfit.cli.render.views.assumed import MARK
from memfit.cli.render.views.text import tenths
from memfit.estimators.base.units import Units
from memfit.estimators.results.comparison import ComparedCell, Comparison, Matrix

_MINUS = "−"
_BY_RUNTIME = {
    "resident_weights": "Weights",
    "kv_per_token": "KV a token",
    "kv": "KV cache",
    "state": "State",
    "workspace": "Workspace",
    "peak": "Peak",
    "recommended_context": "Longest context",
}
_FIGURES = ("model", "figure", "unit", "value", "basis", "difference", "percent", "reason")
_CELL = ("verdict", "exceeded", "peak_bytes", "needed_bytes", "working_set_bytes")


@view(Comparison)
class ComparisonView(NamedTuple):
    """A comparison; ``by_runtime``: its models are one model under several runtimes."""

    result: Comparison
    units: Units
    by_runtime: bool = False
    plot: bool = False

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield a row for each model and figure; with a matrix, one for each cell instead."""
        return _cells(self.result.matrix) if self.result.matrix else _values(self.result)

    def document(self) -> Document:
        """Return the models, a table of their figures, notes, and a table of what fits."""
        result = self.result
        facts = (compare_text.task(result), estimate_text.machine(result, self.units))
        matrix = _matrix(result, result.matrix, self.units) if result.matrix else ()
        return (
            Heading("Memory compared", only="page"),
            *self._models(),
            Text(facts, style="dim"),
            *self._figures(),
            section("", compare_text.notes(result)),
            *matrix,
            *(_charts(result, self.units) if self.plot else ()),
        )

    def _models(self) -> Iterator[Text]:
        models = self.result.models
        titles = [f"{model.label}: {compare_text.title(model)}" for model in models]
        yield Text(titles, mark="1.", only="page" if self.by_runtime else "")
        described = next((model.model for model in models if model.model), None)
        if self.by_runtime and described:
            yield Text([estimate_text.title(described)], only="terminal")

    def _figures(self) -> Iterator[Table | Columns]:
        result, units = self.result, self.units
        if self.by_runtime:
            yield _runtimes(result, units)
        names = ["Verdict", *(compare_text.figure_name(figure.name) for figure in result.figures)]
        first, *others = (
            Column(heading, _column(result, index, units), page_headings=_page_headings(index))
            for index, heading in enumerate(_headings(result))
        )
        # Every block repeats the first model, because the others are compared with it.
        fixed = (Column("", [(name,) for name in names], is_left=True, page_headings=[""]), first)
        yield Columns(fixed, others, only="page" if self.by_runtime else "")


def _page_headings(index: int) -> tuple[str, ...]:
    return (str(index + 1), "against 1", "") if index else ("1",)


def _column(result: Comparison, index: int, units: Units) -> list[tuple[str, ...]]:
    """One model's value, difference and percent of each figure, the verdict above them."""
    verdict = compare_text.verdict_text(result.models[index], result)
    cells: list[tuple[str, ...]] = [(verdict, "", "")]
    for figure in result.figures:
        value = figure.values[index]
        changes = (
            compare_text.difference_texts(value, figure.unit, units, _MINUS) if index else ("", "")
        )
        cells.append((compare_text.figure_text(figure, index, result, units), *changes))
    return cells


def _runtimes(result: Comparison, units: Units) -> Table:
    figures = [figure for figure in result.figures if figure.name in _BY_RUNTIME]
    rows = [
        (
            f"{index + 1} {model.label}",
            compare_text.verdict_text(model, result),
            *(compare_text.figure_text(figure, index, result, units) for figure in figures),
        )
        for index, model in enumerate(result.models)
    ]
    headings = ("Runtime", "Verdict", *(_BY_RUNTIME[figure.name] for figure in figures))
    return Table(headings, rows, align="llr", gap=False, only="terminal")


def _matrix(result: Comparison, matrix: Matrix, units: Units) -> Iterator[Heading | Columns | Text]:
    notes = compare_text.Footnotes()
    models = len(result.models)
    combinations = [cell.settings for cell in matrix.cells[::models]]
    axes = [
        Column(
            name,
            [(compare_text.setting_text(settings[name]),) for settings in combinations],
            page_headings=[name],
        )
        for name in matrix.axes
    ]
    columns = [
        Column(
            heading,
            [compare_text.cell_texts(cell, units, notes) for cell in matrix.cells[index::models]],
            is_left=True,
            page_headings=[str(index + 1)],
        )
        for index, heading in enumerate(_headings(result))
    ]
    yield Heading("What fits", level=3, only="page")
    yield Columns(axes, columns, gap=True)
    yield Text([compare_text.tally(matrix)])
    yield section("", notes.lines())


def _charts(result: Comparison, units: Units) -> Iterator[Chart]:
    """What each model needs, to one scale; with a matrix also every combination in colours."""
    figures = {figure.name: figure.values for figure in result.figures}
    budget = result.device.working_set_bytes if result.device else None
    bars = []
    for index, (heading, model) in enumerate(zip(_headings(result), result.models, strict=True)):
        if model.needed_bytes is None:
            continue
        weights, *caches = (
            value.value if (value := figures[name][index]) else 0
            for name in ("resident_weights", "kv", "state")
        )
        bars.append(needed_bar(heading, (weights, sum(caches)), model.needed_bytes, budget))
    if bars:
        limit = working_set(budget, units)
        yield BarChart(title="Memory", kinds=NEEDED, bars=bars, units=units, limit=limit)
    if result.matrix:
        yield HeatMap(table=_heat_table(result, result.matrix, units))


def _heat_table(result: Comparison, matrix: Matrix, units: Units) -> Table:
    models = len(result.models)
    rows: list[list[str | Toned]] = []
    for start in range(0, len(matrix.cells), models):
        cells = matrix.cells[start : start + models]
        settings = (f"{k} {compare_text.setting_text(v)}" for k, v in cells[0].settings.items())
        rows.append([", ".join(settings), *(_heat_cell(cell, units) for cell in cells)])
    unit = "GB" if units is Units.GB else "GiB"
    title = f"Needs in {unit} by settings and model"
    return Table(("", *_headings(result)), rows, title, align="l", gap=True)


def _heat_cell(cell: ComparedCell, units: Units) -> Toned:
    if cell.needed_bytes is None or cell.verdict is None:
        return Toned("-", "default")
    word = {"tight": " tight", "exceeds": " no", "does_not_load": " does not load"}.get(
        cell.verdict, ""
    )
    return Toned(f"{tenths(cell.needed_bytes, units)}{word}", VERDICT_COLOURS[cell.verdict])


def _headings(result: Comparison) -> Iterator[str]:
    """Each model's number, and its name without the common parent directories."""
    paths = [model.label.split("/") for model in result.models]
    marks = [MARK if model.model and model.model.assumed_from else "" for model in result.models]
    common = 0
    while len({tuple(path[: common + 1]) for path in paths}) == 1 and common + 1 < len(paths[0]):
        common += 1
    for number, (mark, path) in enumerate(zip(marks, paths, strict=True), 1):
        yield f"{number} {mark}{'/'.join(path[common:])}"


def _values(result: Comparison) -> Iterator[tuple[Any, ...]]:
    yield _FIGURES
    for index, model in enumerate(result.models):
        if model.undecided:
            yield (model.label, "", "", "", "", "", "", model.undecided.reason)
            continue
        yield (model.label, "verdict", "", model.verdict, "", "", "", " ".join(model.exceeded))
        for figure in result.figures:
            value = figure.values[index]
            if value is None:
                yield (model.label, figure.name, figure.unit, "", "", "", "", "")
                continue
            change = value.difference
            changes = (change.amount, change.percent) if change else ("", "")
            yield (model.label, figure.name, figure.unit, value.value, value.basis, *changes, "")


def _cells(matrix: Matrix) -> Iterator[tuple[Any, ...]]:
    yield ("model", *matrix.axes, *_CELL, "reason")
    for cell in matrix.cells:
        settings = ("none" if value is None else value for value in cell.settings.values())
        figures = (cell.verdict, " ".join(cell.exceeded), *(getattr(cell, n) for n in _CELL[2:]))
        reason = cell.undecided.reason if cell.undecided else ""
        yield (cell.model, *settings, *figures, reason)
