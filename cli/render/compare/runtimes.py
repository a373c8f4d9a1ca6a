"""One model under several runtimes: a row each, where models side by side have a column."""

from collections.abc import Iterator

from memfit.cli.render import grid
from memfit.cli.render.compare import words
from memfit.cli.render.terminal import Page
from memfit.estimators.base.units import Units
from memfit.estimators.results.comparison import ComparedFigure, Comparison

_SHOWN = {
    "resident_weights": "Weights",
    "kv_per_token": "KV a token",
    "kv": "KV cache",
    "state": "State",
    "workspace": "Workspace",
    "peak": "Peak",
    "recommended_context": "Longest context",
}


def draw(page: Page, result: Comparison, units: Units) -> None:
    """Draw a row for each runtime; one that cannot run the model has its reason below."""
    figures = [figure for figure in result.figures if figure.name in _SHOWN]
    rows = [
        (
            f"{index + 1} {model.label}",
            words.verdict_text(model, result),
            *_cells(figures, index, result, units),
        )
        for index, model in enumerate(result.models)
    ]
    headings = ("Runtime", "Verdict", *(_SHOWN[figure.name] for figure in figures))
    grid.draw(page, headings, rows, left=2)


def _cells(
    figures: list[ComparedFigure], index: int, result: Comparison, units: Units
) -> Iterator[str]:
    for figure in figures:
        value = figure.values[index]
        if value is None and figure.name == "recommended_context":
            yield words.context_text(result.models[index], result)
        else:
            yield words.value_text(value, figure.unit, units)
