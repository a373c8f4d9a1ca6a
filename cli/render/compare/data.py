"""A comparison as CSV: the fields of the result, nothing computed."""

from collections.abc import Iterator
from typing import Any

from memfit.cli.render.data import csv_text
from memfit.estimators.results.comparison import Comparison

_FIGURES = ("model", "figure", "unit", "value", "basis", "difference", "percent", "reason")
_CELL = ("verdict", "exceeded", "peak_bytes", "needed_bytes", "working_set_bytes")


def to_csv(result: Comparison) -> str:
    """Return one line for each model and figure; with a matrix, one line for each cell instead."""
    return csv_text(_matrix(result) if result.matrix else _figures(result))


def _figures(result: Comparison) -> Iterator[tuple[Any, ...]]:
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


def _matrix(result: Comparison) -> Iterator[tuple[Any, ...]]:
    if result.matrix is None:
        return
    yield ("model", *result.matrix.axes, *_CELL, "reason")
    for cell in result.matrix.cells:
        settings = ("none" if value is None else value for value in cell.settings.values())
        figures = (cell.verdict, " ".join(cell.exceeded), *(getattr(cell, n) for n in _CELL[2:]))
        reason = cell.undecided.reason if cell.undecided else ""
        yield (cell.model, *settings, *figures, reason)
