"""Percentiles of the tokens in a request trace."""

from collections.abc import Iterable

from memfit.estimators.base.units import ceil_div
from memfit.estimators.results.context import Distribution

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: list[int], percent: int) -> int:
    """Return the nearest-rank percentile of sorted counts.

    >>> percentile([1, 2, 3, 4], 50), percentile([1, 2, 3, 4], 99)
    (2, 4)
    """
    return ordered[max(0, ceil_div(percent * len(ordered), 100) - 1)]


def distribution(tokens: Iterable[int]) -> Distribution:
    """Return the percentiles of at least one count."""
    ordered = sorted(tokens)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    mean = ceil_div(sum(ordered), len(ordered))
    return Distribution(mean, p50, p90, p95, p99, ordered[-1])
