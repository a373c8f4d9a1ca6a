"""A tune result as a document, and as rows."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from string import ascii_letters
from typing import Any, NamedTuple

from memfit.cli.render.chart import working_set
from memfit.cli.render.document import (
    VERDICT_COLOURS,
    Bar,
    BarChart,
    Chart,
    Document,
    Dot,
    Scatter,
    Table,
    report,
)
from memfit.cli.render.view import view
from memfit.cli.render.views import text as estimate_text
from memfit.cli.render.views import tune_text
from memfit.cli.render.views.estimate_text import recommended as recommended_text
from memfit.estimators.base.units import Units
from memfit.probes.figures import FIGURES
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
    "batch",
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


@view(TuneResult)
class TuneView(NamedTuple):
    """A tune result; ``plot`` adds charts of a sweep."""

    result: TuneResult
    units: Units
    plot: bool

    def rows(self) -> Iterator[Iterator[Any]]:
        """Yield a row for each point: its settings, then every figure in bytes, both values."""
        columns = (f"{name}_{side}_bytes" for name in FIGURES for side in ("estimated", "measured"))
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
            tune_text.files(result, units),
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
                ("Recommended", tuple(self._recommended())),
                ("Speed and memory", result.trade),
                ("Beyond the stated error: please report these lines", result.report),
                ("Notes", tuple(note.message for note in result.notes)),
            ),
            charts=tuple(_charts(result, units)) if self.plot else (),
            commands=result.flags,
        )

    def _recommended(self) -> Iterator[str]:
        found = self.result.recommended
        if found and (text := recommended_text(found, self.units)):
            yield text
        yield from self.result.recommendation.reasons


def _cells(point: Point) -> Iterator[Any]:
    yield from (getattr(point.workload, name) for name in _SETTINGS)
    yield from (getattr(point, name) for name in _OF_POINT)
    figures = {figure.name: figure for figure in point.figures}
    for name in FIGURES:
        figure = figures.get(name)
        yield figure.estimated_bytes if figure else None
        yield figure.measured_bytes if figure else None
    yield from (getattr(point.speed, name, None) for name in _SPEEDS)
    yield point.reason


def _charts(result: TuneResult, units: Units) -> Iterator[Chart]:
    """Yield memory against context by setting, and speed against memory, of the usual points."""
    points = _lettered(result.usual_points)
    if points:
        yield _memory_chart(points, result.device.working_set_bytes, units)
        yield from _speed_charts(points, units)


def _memory_chart(points: Sequence[tuple[str, Point]], budget: int, units: Units) -> BarChart:
    # A budget far above the bars would leave no room for them.
    is_near = budget < 2 * max(point.peak_bytes or 0 for _, point in points)
    return BarChart(
        title="Memory against context",
        kinds=("weights", "caches", "workspace"),
        bars=tuple(_bars(points, budget if is_near else None)),
        units=units,
        limit=working_set(budget, units) if is_near else "",
    )


def _speed_charts(points: Sequence[tuple[str, Point]], units: Units) -> Iterator[Scatter]:
    phases: dict[str, list[Dot]] = {"Prefill": [], "Decode": []}
    for letter, point in points:
        if speed := point.speed:
            rates = (speed.prefill_tokens_per_second, speed.decode_tokens_per_second)
            for dots, rate in zip(phases.values(), rates, strict=True):
                dots += [Dot(letter, point.peak_bytes or 0, rate)] if rate is not None else []
    sizes = [dot.nbytes for dots in phases.values() for dot in dots]
    for phase, dots in phases.items():
        if dots:
            yield Scatter(
                title=f"{phase}, tokens/s against memory",
                dots=dots,
                units=units,
                least=min(sizes),
                most=max(sizes),
            )


def _lettered(points: Sequence[Point]) -> list[tuple[str, Point]]:
    """The points with the letter of their settings, sorted by setting, then by context."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(tune_text.settings_without_context(point.workload), []).append(point)
    letters = chain(ascii_letters, repeat("*"))
    return [
        (letter, point)
        for letter, group in zip(letters, groups.values(), strict=False)
        for point in sorted(group, key=lambda each: each.workload.prompt_tokens)
    ]


def _bars(points: Sequence[tuple[str, Point]], budget: int | None) -> Iterator[Bar]:
    last = ""
    for letter, point in points:
        settings = tune_text.settings_without_context(point.workload)
        yield Bar(
            f"{point.workload.prompt_tokens} tokens",
            point.parts,
            budget,
            heading="" if letter == last else f"{letter}  {settings}",
        )
        last = letter
