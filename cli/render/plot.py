"""Draw memory against context with characters: a row for each context, the budget as a line."""

from collections.abc import Iterator
from functools import partial

from memfit.cli.render.chart import ASCII_MARKS, LEAST_WIDTH, UNICODE_MARKS, stacked_bar
from memfit.cli.render.document import Chart
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import CurvePoint, Plots


def charts(plots: Plots, budget: int | None, units: Units) -> Iterator[Chart]:
    """Yield each available plot: over the run, then against context."""
    if plots.run:
        from memfit.cli.render.run_plot import run_chart  # only a trace has a run

        yield run_chart(plots.run, budget, units)
    if plots.curve:
        yield curve_chart(plots.curve, budget, units, by=plots.curve_method)


def curve_chart(
    curve: tuple[CurvePoint, ...], budget: int | None, units: Units, *, by: str | None = None
) -> Chart:
    """Return weights, caches and the rest of the peak by context, to scale.

    ``by`` names the method of the figures, if it differs from the estimate's.
    """
    return Chart(partial(_lines, curve, budget, units, f", by {by}" if by else ""))


def _lines(
    curve: tuple[CurvePoint, ...],
    budget: int | None,
    units: Units,
    by: str,
    width: int,
    ascii_only: bool,
) -> Iterator[str]:
    marks = ASCII_MARKS if ascii_only else UNICODE_MARKS
    labels = [
        f"{point.context_tokens:>8} {format_bytes(point.peak_bytes, units):>10} " for point in curve
    ]
    room = max(LEAST_WIDTH, width - max(map(len, labels)) - 1)
    whole = max(*(point.peak_bytes for point in curve), budget or 1)
    yield f"Memory against context{by}: {marks[0]} weights  {marks[1]} caches  {marks[2]} workspace"
    if budget:
        yield f"{marks[3]} working set {format_bytes(budget, units)}"
    for label, point in zip(labels, curve, strict=True):
        rest = point.peak_bytes - point.weights_bytes - point.cache_bytes
        parts = (point.weights_bytes, point.cache_bytes, rest)
        yield (label + stacked_bar(parts, whole, room, marks, budget or None)).rstrip()
