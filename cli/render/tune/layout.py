"""The document of a tune result, for the terminal and Markdown."""

from memfit.cli.render import text as estimate_text
from memfit.cli.render.document import VERDICT_COLOURS, Document, Table
from memfit.cli.render.tune import text as tune_text
from memfit.cli.render.tune.plot import plots
from memfit.estimators.base.units import Units
from memfit.probes.result import TuneResult

_FIGURES = ("Figure", "Estimated", "Measured", "Difference", "", "Spread")
_POINTS = (
    "Prompt",
    "Step",
    "KV bits",
    "Runs",
    "Estimated",
    "Measured",
    "",
    "Prefill/s",
    "Decode/s",
)


def to_document(result: TuneResult, units: Units, *, plot: bool) -> Document:
    """Return the result's texts, all figures of the first point, and a row for each point."""
    tables = [Table(_FIGURES, tuple(tune_text.figure_rows(result.points[0], units)))]
    if len(result.points) > 1:
        points = tuple(tune_text.point_rows(result.points, units))
        tables.append(Table(_POINTS, points, "Every point"))
    facts = (
        estimate_text.title(result.model),
        tune_text.task(result),
        estimate_text.machine(result, units),
        *tune_text.speeds(result),
        tune_text.bases(result),
    )
    return Document(
        title=result.model.id,
        facts=tuple(filter(None, facts)),
        tables=tuple(tables),
        verdict=tune_text.verdict(result, units),
        colour=VERDICT_COLOURS[result.verdict],
        sections=(
            ("Not measured", tuple(tune_text.reasons(result.points[1:]))),
            ("Recommended", result.recommendation.reasons),
            ("Speed and memory", result.trade),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        charts=plots(result, units) if plot else (),
        commands=result.flags,
    )
