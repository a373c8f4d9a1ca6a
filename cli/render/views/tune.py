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
            charts=_charts(result, units) if self.plot else (),
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


def _charts(result: TuneResult, units: Units) -> tuple[Chart, ...]:
    """Memory against context by setting and speed against memory, of the measured points."""
    measured = [p for p in result.points if p.status == "measured" and p.wired_limit_bytes is None]
    if not measured:
        return ()
    points = _lettered(measured)
    prefill, decode = [], []
    for letter, point in points:
        if point.speed:
            nbytes, rate = point.peak_bytes or 0, point.speed.decode_tokens_per_second
            prefill.append(Dot(letter, nbytes, point.speed.prefill_tokens_per_second))
            decode += [Dot(letter, nbytes, rate)] if rate is not None else []
    sizes = [dot.nbytes for dot in (*prefill, *decode)]
    budget = result.device.working_set_bytes
    # A budget far above the bars would leave no room for them.
    is_near = budget < 2 * max(point.peak_bytes or 0 for _, point in points)
    return (
        BarChart(
            title="Memory against context",
            kinds=("weights", "caches", "workspace"),
            bars=tuple(_bars(points, budget if is_near else None)),
            units=units,
            limit=working_set(budget, units) if is_near else "",
        ),
        *(
            Scatter(
                title=f"{phase}, tokens/s against memory",
                dots=dots,
                units=units,
                least=min(sizes),
                most=max(sizes),
            )
            for phase, dots in (("Prefill", prefill), ("Decode", decode))
            if dots
        ),
    )


def _lettered(points: Sequence[Point]) -> list[tuple[str, Point]]:
    """The points with the letter of their settings, sorted by setting, then by context."""
    names = dict.fromkeys(tune_text.settings_without_context(point.workload) for point in points)
    letters = dict(zip(names, chain(ascii_letters, repeat("*")), strict=False))
    order = {name: place for place, name in enumerate(names)}
    named = [(tune_text.settings_without_context(point.workload), point) for point in points]
    named.sort(key=lambda each: (order[each[0]], each[1].workload.prompt_tokens))
    return [(letters[name], point) for name, point in named]


def _bars(points: Sequence[tuple[str, Point]], budget: int | None) -> Iterator[Bar]:
    last = ""
    for letter, point in points:
        tokens, peak = point.workload.prompt_tokens, point.peak_bytes or 0
        settings = tune_text.settings_without_context(point.workload)
        yield Bar(
            f"{tokens} tokens",
            _parts(point, peak),
            budget,
            heading="" if letter == last else f"{letter}  {settings}",
        )
        last = letter


def _parts(point: Point, peak: int) -> tuple[int, int, int]:
    """Bytes of weights, caches and the rest of the peak."""
    figures = {figure.name: figure.measured_bytes or 0 for figure in point.figures}
    weights, caches = figures.get("active", 0), figures.get("kv", 0) + figures.get("ssm", 0)
    return weights, caches, peak - weights - caches
