"""A comparison, and every text of it: as a document and as rows."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from memfit.cli.render.chart import NEEDED, needed_bar, working_set
from memfit.cli.render.document import (
    VERDICT_CELLS,
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
from memfit.cli.render.views import text as estimate_text
from memfit.cli.render.views.assumed import MARK
from memfit.estimators.base.units import Rounding, Units, format_bytes
from memfit.estimators.results.comparison import (
    Compared,
    ComparedCell,
    ComparedFigure,
    ComparedValue,
    Comparison,
    Matrix,
    SettingValue,
)

_MINUS = "−"
_LABELS = {
    "weights": ("Weights on disk", ""),
    "resident_weights": ("Weights resident", "Weights"),
    "kv_per_token": ("KV per token", "KV a token"),
    "kv": ("KV cache", "KV cache"),
    "state": ("Recurrent state", "State"),
    "workspace": ("Workspace", "Workspace"),
    "peak": ("Peak", "Peak"),
    "recommended_context": ("Longest context", "Longest context"),
}
"""The label of each figure, and the short one of a table by runtime; empty where it has none."""
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
        facts = (_task(result), estimate_text.machine(result, self.units))
        matrix = _matrix(result, result.matrix, self.units) if result.matrix else ()
        return (
            Heading("Memory compared", only="page"),
            *self._models(),
            Text(facts, style="dim"),
            *self._figures(),
            section("", _notes(result)),
            *matrix,
            *(_charts(result, self.units) if self.plot else ()),
        )

    def _models(self) -> Iterator[Text]:
        models = self.result.models
        titles = [f"{model.label}: {_title(model)}" for model in models]
        yield Text(titles, mark="1.", only="page" if self.by_runtime else "")
        described = next((model.model for model in models if model.model), None)
        if self.by_runtime and described:
            yield Text([estimate_text.title(described)], only="terminal")

    def _figures(self) -> Iterator[Table | Columns]:
        result, units = self.result, self.units
        if self.by_runtime:
            yield _runtimes(result, units)
        names = ["Verdict", *(_figure_name(figure.name) for figure in result.figures)]
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
    verdict = _verdict_text(result.models[index], result)
    cells: list[tuple[str, ...]] = [(verdict, "", "")]
    for figure in result.figures:
        value = figure.values[index]
        changes = _difference_texts(value, figure.unit, units) if index else ("", "")
        cells.append((_figure_text(figure, index, result, units), *changes))
    return cells


def _runtimes(result: Comparison, units: Units) -> Table:
    figures = [figure for figure in result.figures if _LABELS.get(figure.name, ("", ""))[1]]
    rows = [
        (
            f"{index + 1} {model.label}",
            _verdict_text(model, result),
            *(_figure_text(figure, index, result, units) for figure in figures),
        )
        for index, model in enumerate(result.models)
    ]
    headings = ("Runtime", "Verdict", *(_LABELS[figure.name][1] for figure in figures))
    return Table(headings, rows, align="llr", gap=False, only="terminal")


def _matrix(result: Comparison, matrix: Matrix, units: Units) -> Iterator[Heading | Columns | Text]:
    notes = _Footnotes()
    models = len(result.models)
    combinations = [cell.settings for cell in matrix.cells[::models]]
    axes = [
        Column(
            name,
            [(_setting_text(settings[name]),) for settings in combinations],
            page_headings=[name],
        )
        for name in matrix.axes
    ]
    columns = [
        Column(
            heading,
            [_cell_texts(cell, units, notes) for cell in matrix.cells[index::models]],
            is_left=True,
            page_headings=[str(index + 1)],
        )
        for index, heading in enumerate(_headings(result))
    ]
    yield Heading("What fits", level=3, only="page")
    yield Columns(axes, columns, gap=True)
    yield Text([_tally(matrix)])
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
        settings = (f"{k} {_setting_text(v)}" for k, v in cells[0].settings.items())
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
    return Toned(
        f"{estimate_text.tenths(cell.needed_bytes, units)}{word}", VERDICT_COLOURS[cell.verdict]
    )


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


class _Footnotes:
    """Notes below a table, each once, with its mark."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Return the mark of a note; a new note gets a new mark."""
        return self._marks.setdefault(text, f"({len(self._marks) + 1})")

    def lines(self) -> list[str]:
        """Return the notes with their marks."""
        return [f"{mark} {text}" for text, mark in self._marks.items()]


def _title(model: Compared) -> str:
    """The heading of a column: the model, and its runtime if that differs between models."""
    text = estimate_text.title(model.model) if model.model else "unknown"
    return f"{text}; {model.runtime}" if model.runtime else text


def _task(result: Comparison) -> str:
    """The workload, and the runtime if it is the same for all models."""
    if any(model.runtime for model in result.models):
        return f"{estimate_text.prompt(result.workload)}; each under its own runtime"
    return estimate_text.task(result)


def _figure_name(name: str) -> str:
    kind, _, part = name.partition(".")
    return f"  {estimate_text.PARTS[part]}" if part else _LABELS[kind][0]


def _figure_text(figure: ComparedFigure, index: int, result: Comparison, units: Units) -> str:
    """One model's figure with its unit, or why there is none."""
    value = figure.values[index]
    if value is None and figure.name == "recommended_context":
        return "-" if result.models[index].undecided or result.device is None else "none fits"
    text = _value_text(value, figure.unit, units)
    is_marked = figure.unit == "tokens" and result.models[index].longest_verdict == "tight"
    return f"{text} !" if is_marked else text


def _value_text(value: ComparedValue | None, unit: str, units: Units) -> str:
    """A figure with its unit; an upper bound says so."""
    if value is None:
        return "-"
    text = _amount(value.value, unit, units)
    # Only bytes are bounded from above: a context that fits by such bytes fits.
    return f"up to {text}" if value.basis == "bound" and unit == "bytes" else text


def _difference_texts(value: ComparedValue | None, unit: str, units: Units) -> tuple[str, str]:
    """A figure's difference from the first model's, in its unit and in percent."""
    if value is None or value.difference is None:
        return "-", "-"
    change = value.difference
    if not change.amount:
        return "same", ""
    sign = "+" if change.amount > 0 else _MINUS
    amount = f"{sign}{_amount(abs(change.amount), unit, units, 'nearest')}"
    share = "from 0" if change.percent is None else f"{sign}{abs(change.percent):.2f} %"
    return amount, share


def _verdict_text(model: Compared, result: Comparison) -> str:
    """The verdict on a model with its share of the working set."""
    if model.undecided or model.verdict is None or model.needed_bytes is None:
        return "unknown"
    if result.device is None or model.verdict == "does_not_load":
        return VERDICT_CELLS[model.verdict]
    share = estimate_text.percent(model.needed_bytes, result.device.working_set_bytes)
    return f"{VERDICT_CELLS[model.verdict]}, {share}"


def _cell_texts(cell: ComparedCell, units: Units, notes: _Footnotes) -> tuple[str, str, str, str]:
    """A cell's verdict, need, share of the working set and footnotes."""
    if cell.undecided or cell.verdict is None or cell.needed_bytes is None:
        reason = cell.undecided.reason if cell.undecided else "no figure"
        return "unknown", "", "", notes.mark(reason)
    budget = cell.working_set_bytes
    share = estimate_text.percent(cell.needed_bytes, budget) if budget else ""
    marks = " ".join(notes.mark(note.message) for note in cell.notes)
    return VERDICT_CELLS[cell.verdict], format_bytes(cell.needed_bytes, units), share, marks


def _setting_text(value: SettingValue) -> str:
    return "none" if value is None else str(value)


def _tally(matrix: Matrix) -> str:
    """The number of cells with each verdict."""
    counts = Counter("undecided" if c.undecided else c.verdict for c in matrix.cells)
    named = [f"{counts[name]} {word}" for name, word in _TALLY.items() if counts[name]]
    return f"{len(matrix.cells)} cells: {', '.join(named)}"


_TALLY = {
    "fits": "fit",
    "tight": "tight",
    "exceeds": "do not fit",
    "does_not_load": "do not load",
    "unknown": "without a device",
    "undecided": "unknown",
}


def _notes(result: Comparison) -> list[str]:
    """The notes on the models, each with the numbers of its models."""
    numbers: dict[str, list[str]] = {}
    for number, model in enumerate(result.models, 1):
        texts = [note.message for note in model.notes if note.code != "device"]
        texts += model.assumptions
        texts += [model.undecided.reason] if model.undecided else []
        for text in dict.fromkeys(texts):
            numbers.setdefault(text, []).append(str(number))
    return [f"{', '.join(of)}: {text}" for text, of in numbers.items()]


def _amount(value: int, unit: str, units: Units, rounding: Rounding = "up") -> str:
    if unit == "bytes":
        return format_bytes(value, units, rounding=rounding)
    return f"{value} tokens"
