"""A tuning in the form that was asked for."""

from memfit.cli.options import CompareFormat
from memfit.cli.render import words as model_words
from memfit.cli.render.plan.sheet import Grid, Sheet, to_markdown, to_table
from memfit.cli.render.tune import words
from memfit.cli.render.tune.data import to_csv, to_json
from memfit.estimators.units import Units
from memfit.probes.result import TuneResult

_COLOURS = {"fits": "green", "tight": "yellow", "exceeds": "red", "unknown": "default"}
_FIGURES = ("Figure", "Estimated", "Measured", "Difference", "", "Spread", "Basis")
_POINTS = (
    "Prompt",
    "Step",
    "KV bits",
    "Estimated",
    "Measured",
    "",
    "First token",
    "Prefill/s",
    "Decode/s",
)


def written(result: TuneResult, form: CompareFormat, units: Units, *, to_file: bool) -> str:
    """Return the result as text that ends with a line feed."""
    if form is CompareFormat.JSON:
        return to_json(result)
    if form is CompareFormat.CSV:
        return to_csv(result)
    sheet = _sheet(result, units)
    if form is CompareFormat.MARKDOWN:
        return to_markdown(sheet)
    return to_table(sheet, to_file=to_file)


def _sheet(result: TuneResult, units: Units) -> Sheet:
    grids = [Grid(_FIGURES, tuple(words.figure_rows(result.points[0], units)))]
    if len(result.points) > 1:
        points = tuple(words.point_rows(result.points, units))
        grids.append(Grid(_POINTS, points, "Every point"))
    facts = (
        model_words.title(result.model),
        words.task(result),
        model_words.machine(result, units),
        "; ".join(words.speeds(result)),
    )
    return Sheet(
        title=result.model.id,
        facts=tuple(filter(None, facts)),
        grids=tuple(grids),
        verdict=words.verdict(result, units),
        colour=_COLOURS[result.verdict],
        sections=(
            ("Not measured", tuple(words.reasons(result.points))),
            ("Recommended", result.recommendation.reasons),
            ("Speed and memory", result.trade),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        to_paste=result.flags,
    )
