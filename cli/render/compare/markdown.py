"""A comparison as Markdown, for a pull request or a page."""

from collections.abc import Iterator

from memfit.cli.render import text as estimate_text
from memfit.cli.render.compare import text as compare_text
from memfit.cli.render.escape import escape_markdown
from memfit.estimators.base.units import Units
from memfit.estimators.results.comparison import ComparedFigure, Comparison, Matrix

_MINUS = "−"


def to_markdown(result: Comparison, units: Units) -> str:
    """Return the comparison as a Markdown section that ends with a line feed."""
    return "\n".join(_lines(result, units)) + "\n"


def _lines(result: Comparison, units: Units) -> Iterator[str]:
    yield "## Memory compared"
    yield ""
    for number, model in enumerate(result.models, 1):
        title = compare_text.title(model)
        yield f"{number}. {escape_markdown(f'{model.label}: {title}')}"
    yield ""
    yield escape_markdown(compare_text.task(result)) + "  "
    yield escape_markdown(estimate_text.machine(result, units))
    yield ""
    yield from _figures(result, units)
    yield from _notes(compare_text.notes(result))
    if result.matrix:
        yield from ("", "### What fits", "")
        yield from _matrix(result, result.matrix, units)


def _figures(result: Comparison, units: Units) -> Iterator[str]:
    others = [str(number) for number in range(2, len(result.models) + 1)]
    yield _row(["", "1", *(cell for n in others for cell in (n, "against 1", ""))])
    yield _row(["---", "---:", *("---:" for _ in others for _ in range(3))])
    verdicts = [compare_text.verdict_text(model, result) for model in result.models]
    yield _row(["Verdict", verdicts[0], *(c for v in verdicts[1:] for c in (v, "", ""))])
    for figure in result.figures:
        yield _row([compare_text.figure_name(figure.name), *_values(figure, result, units)])


def _values(figure: ComparedFigure, result: Comparison, units: Units) -> Iterator[str]:
    for index, value in enumerate(figure.values):
        yield compare_text.figure_text(figure, index, result, units)
        if index:
            yield from compare_text.difference_texts(value, figure.unit, units, _MINUS)


def _matrix(result: Comparison, matrix: Matrix, units: Units) -> Iterator[str]:
    notes = compare_text.Footnotes()
    models = len(result.models)
    yield _row([*matrix.axes, *(str(number) for number in range(1, models + 1))])
    yield _row([*("---:" for _ in matrix.axes), *("---" for _ in range(models))])
    for start in range(0, len(matrix.cells), models):
        cells = matrix.cells[start : start + models]
        settings = map(compare_text.setting_text, cells[0].settings.values())
        texts = (compare_text.cell_texts(cell, units, notes) for cell in cells)
        yield _row([*settings, *(" ".join(filter(None, text)) for text in texts)])
    yield ""
    yield compare_text.tally(matrix)
    yield from _notes(notes.lines())


def _notes(lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield from (f"- {escape_markdown(line)}" for line in lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"
