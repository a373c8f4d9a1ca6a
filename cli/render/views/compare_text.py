"""Texts for a comparison, shared by the table and Markdown."""

from collections import Counter

from memfit.cli.render.document import VERDICT_CELLS
from memfit.cli.render.views.text import PARTS, percent, prompt
from memfit.cli.render.views.text import task as estimate_task
from memfit.cli.render.views.text import title as estimate_title
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.comparison import (
    Compared,
    ComparedCell,
    ComparedFigure,
    ComparedValue,
    Comparison,
    Matrix,
    SettingValue,
)

_FIGURES = {
    "weights": "Weights on disk",
    "resident_weights": "Weights resident",
    "kv_per_token": "KV per token",
    "kv": "KV cache",
    "state": "Recurrent state",
    "workspace": "Workspace",
    "peak": "Peak",
    "recommended_context": "Longest context",
}


class Footnotes:
    """Notes below a table, each once, with its mark."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Return the mark of a note; a new note gets a new mark."""
        return self._marks.setdefault(text, f"({len(self._marks) + 1})")

    def lines(self) -> list[str]:
        """Return the notes with their marks."""
        return [f"{mark} {text}" for text, mark in self._marks.items()]


def title(model: Compared) -> str:
    """The heading of a column: the model, and its runtime if that differs between models."""
    text = estimate_title(model.model) if model.model else "unknown"
    return f"{text}; {model.runtime}" if model.runtime else text


def task(result: Comparison) -> str:
    """The workload, and the runtime if it is the same for all models."""
    if any(model.runtime for model in result.models):
        return f"{prompt(result.workload)}; each under its own runtime"
    return estimate_task(result)


def figure_name(name: str) -> str:
    kind, _, part = name.partition(".")
    return f"  {PARTS[part]}" if part else _FIGURES[kind]


def figure_text(figure: ComparedFigure, index: int, result: Comparison, units: Units) -> str:
    """One model's figure with its unit, or why there is none."""
    value = figure.values[index]
    if value is None and figure.name == "recommended_context":
        return "-" if result.models[index].undecided or result.device is None else "none fits"
    return _value_text(value, figure.unit, units)


def _value_text(value: ComparedValue | None, unit: str, units: Units) -> str:
    """A figure with its unit; an upper bound says so."""
    if value is None:
        return "-"
    text = _amount(value.value, unit, units)
    # Only bytes are bounded from above: a context that fits by such bytes fits.
    return f"up to {text}" if value.basis == "bound" and unit == "bytes" else text


def difference_texts(
    value: ComparedValue | None, unit: str, units: Units, minus: str
) -> tuple[str, str]:
    """A figure's difference from the first model's, in its unit and in percent."""
    if value is None or value.difference is None:
        return "-", "-"
    change = value.difference
    if not change.amount:
        return "same", ""
    sign = "+" if change.amount > 0 else minus
    amount = f"{sign}{_amount(abs(change.amount), unit, units)}"
    share = "from 0" if change.percent is None else f"{sign}{abs(change.percent):.2f} %"
    return amount, share


def verdict_text(model: Compared, result: Comparison) -> str:
    """The verdict on a model with its share of the working set."""
    if model.undecided or model.verdict is None or model.needed_bytes is None:
        return "unknown"
    if result.device is None or model.verdict == "does_not_load":
        return VERDICT_CELLS[model.verdict]
    share = percent(model.needed_bytes, result.device.working_set_bytes)
    return f"{VERDICT_CELLS[model.verdict]}, {share}"


def cell_texts(cell: ComparedCell, units: Units, notes: Footnotes) -> tuple[str, str, str, str]:
    """A cell's verdict, need, share of the working set and footnotes."""
    if cell.undecided or cell.verdict is None or cell.needed_bytes is None:
        reason = cell.undecided.reason if cell.undecided else "no figure"
        return "unknown", "", "", notes.mark(reason)
    budget = cell.working_set_bytes
    share = percent(cell.needed_bytes, budget) if budget else ""
    marks = " ".join(notes.mark(note.message) for note in cell.notes)
    return VERDICT_CELLS[cell.verdict], format_bytes(cell.needed_bytes, units), share, marks


def setting_text(value: SettingValue) -> str:
    return "none" if value is None else str(value)


def tally(matrix: Matrix) -> str:
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


def notes(result: Comparison) -> list[str]:
    """The notes on the models, each with the numbers of its models."""
    numbers: dict[str, list[str]] = {}
    for number, model in enumerate(result.models, 1):
        texts = [note.message for note in model.notes if note.code != "device"]
        texts += model.assumptions
        texts += [model.undecided.reason] if model.undecided else []
        for text in dict.fromkeys(texts):
            numbers.setdefault(text, []).append(str(number))
    return [f"{', '.join(of)}: {text}" for text, of in numbers.items()]


def _amount(value: int, unit: str, units: Units) -> str:
    return format_bytes(value, units) if unit == "bytes" else f"{value} tokens"
