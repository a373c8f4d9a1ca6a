"""A tune result as a document, and as rows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from memfit.cli.render.document import VERDICT_COLOURS, Document, Table, report
from memfit.cli.render.sweep_plot import plots
from memfit.cli.render.view import as_data
from memfit.cli.render.views import text as estimate_text
from memfit.cli.render.views import tune_text
from memfit.estimators.base.units import Units
from memfit.probes.figures import NAMES
from memfit.probes.result import Point, TuneResult

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
_SETTINGS = (
    "prompt_tokens",
    "max_tokens",
    "prefill_step",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "max_kv_size",
)
_OF_POINT = ("wired_limit_bytes", "status", "repeats", "measurement_id")
_SPEEDS = (
    "first_token_ns",
    "first_token_spread_ns",
    "prefill_tokens_per_second",
    "prefill_spread",
    "decode_tokens_per_second",
    "decode_spread",
)


class TuneView(NamedTuple):
    """A tune result; ``plot`` adds charts of a sweep."""

    result: TuneResult
    units: Units
    plot: bool

    def data(self) -> dict[str, Any]:
        """Return the fields of the result."""
        return as_data(self.result)

    def rows(self) -> Iterator[Iterator[Any]]:
        """Yield a row for each point: its settings, then every figure in bytes, both values."""
        columns = (f"{name}_{side}_bytes" for name in NAMES for side in ("estimated", "measured"))
        yield iter((*_SETTINGS, *_OF_POINT, *columns, *_SPEEDS, "reason"))
        yield from map(_cells, self.result.points)

    def document(self) -> Document:
        """Return the result's texts, all figures of the first point, and a row for each point."""
        result, units = self.result, self.units
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
        return report(
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
            charts=plots(result, units) if self.plot else (),
            commands=result.flags,
        )


def _cells(point: Point) -> Iterator[Any]:
    yield from (getattr(point.workload, name) for name in _SETTINGS)
    yield from (getattr(point, name) for name in _OF_POINT)
    figures = {figure.name: figure for figure in point.figures}
    for name in NAMES:
        figure = figures.get(name)
        yield figure.estimated_bytes if figure else None
        yield figure.measured_bytes if figure else None
    yield from (getattr(point.speed, name, None) for name in _SPEEDS)
    yield point.reason
