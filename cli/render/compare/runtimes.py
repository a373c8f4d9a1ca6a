"""One model under several runtimes, a row for each runtime."""

from memfit.cli.render import grid
from memfit.cli.render.compare import text as compare_text
from memfit.cli.render.terminal import Page
from memfit.estimators.base.units import Units
from memfit.estimators.results.comparison import Comparison

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
    """Draw a row for each runtime; the reason why one cannot run the model is below the table."""
    figures = [figure for figure in result.figures if figure.name in _SHOWN]
    rows = [
        (
            f"{index + 1} {model.label}",
            compare_text.verdict_text(model, result),
            *(compare_text.figure_text(figure, index, result, units) for figure in figures),
        )
        for index, model in enumerate(result.models)
    ]
    headings = ("Runtime", "Verdict", *(_SHOWN[figure.name] for figure in figures))
    grid.draw(page, headings, rows, left=2)
