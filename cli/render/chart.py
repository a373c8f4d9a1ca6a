"""Charts that several views have."""

from collections.abc import Sequence

from memfit.cli.render.document import Bar, BarChart
from memfit.estimators.base.units import Units, format_limit
from memfit.estimators.results.estimate import CurvePoint

NEEDED = ("weights", "caches", "workspace and margin")


def curve_chart(
    curve: Sequence[CurvePoint], budget: int | None, units: Units, *, by: str | None = None
) -> BarChart:
    """Return weights, caches and the rest of what is needed by context.

    ``by`` names the method of the figures, if it differs from the estimate's.
    """
    bars = [
        needed_bar(
            f"{point.context_tokens} tokens",
            (point.weights_bytes, point.cache_bytes),
            point.peak_bytes,
            budget,
        )
        for point in curve
    ]
    title = f"Memory against context, by {by}" if by else "Memory against context"
    return BarChart(
        title=title, kinds=NEEDED, bars=bars, units=units, limit=working_set(budget, units)
    )


def needed_bar(label: str, parts: tuple[int, int], needed: int, budget: int | None) -> Bar:
    """Return a bar of weights, caches and the rest of what is needed."""
    return Bar(label, (*parts, needed - sum(parts)), budget or None)


def working_set(budget: int | None, units: Units) -> str:
    """Return the name of the limit with its size, empty without one."""
    return f"working set {format_limit(budget, units)}" if budget else ""
