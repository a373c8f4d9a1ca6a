"""Draw memory against context with characters: a row for each context, the budget as a line."""

from collections.abc import Iterator

from memfit.cli.render.chart import ASCII_MARKS, LEAST_WIDTH, UNICODE_MARKS, stacked_bar
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import CurvePoint, Plots


def drawn(
    plots: Plots, budget: int | None, units: Units, width: int, *, ascii_only: bool
) -> Iterator[Iterator[str]]:
    """Yield the lines of each available plot: over the run, then against context."""
    if plots.run:
        from memfit.cli.render.run_plot import run_lines  # only a trace has a run

        yield run_lines(plots.run, budget, units, width, ascii_only=ascii_only)
    if plots.curve:
        by = f", by {plots.curve_method}" if plots.curve_method else ""
        yield plot_lines(plots.curve, budget, units, width, ascii_only=ascii_only, by=by)


def plot_lines(
    curve: tuple[CurvePoint, ...],
    budget: int | None,
    units: Units,
    width: int,
    *,
    ascii_only: bool,
    by: str = "",
) -> Iterator[str]:
    """Yield the lines of the plot: weights, caches and the rest of the peak, to scale.

    ``by`` names the method of the figures, if it differs from the estimate's.
    """
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
