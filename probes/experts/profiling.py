"""What routers chose, as the profile that slots are filled by."""

from collections.abc import Sequence
from fractions import Fraction

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.plans.experts.routing import ChosenSlots, RoutingProfile
from memfit.estimators.weights.expert_slots import ExpertLayer
from memfit.probes.experts.runner import ExpertLayerInfo, LayerRouting

Counts = tuple[tuple[int, ...], ...]
"""For each layer, a number for each expert."""


def rows_of(
    layers: Sequence[ExpertLayerInfo], routing: Sequence[LayerRouting]
) -> tuple[ExpertLayer, ...]:
    """Return the layers with experts as plans see them.

    Raises:
        UnsupportedError: when layers have different numbers of experts.
    """
    rows = tuple(
        ExpertLayer(layer.layer, layer.experts, each.top_k, False, layer.nbytes // layer.experts)
        for layer, each in zip(layers, routing, strict=True)
    )
    if len({(row.experts, row.top_k) for row in rows}) > 1:
        raise UnsupportedError("its layers have different numbers of experts")
    return rows


def profile_of(
    routing: Sequence[LayerRouting], rows: Sequence[ExpertLayer], prompts: int
) -> RoutingProfile:
    """Return the profile of what was counted over a number of prompts."""
    by_prompt = tuple(
        _dense(each.prompts, row.experts) for each, row in zip(routing, rows, strict=True)
    )
    return RoutingProfile(token_counts(routing, rows), prompts, by_prompt)


def token_counts(routing: Sequence[LayerRouting], rows: Sequence[ExpertLayer]) -> Counts:
    """Return how many tokens used each expert."""
    return tuple(_dense(each.tokens, row.experts) for each, row in zip(routing, rows, strict=True))


def coverage_percent(slots: Sequence[ChosenSlots], counts: Counts) -> float:
    """Return the share of the routing that chosen experts cover.

    >>> coverage_percent([ChosenSlots((0, 2), (), 2)], ((6, 1, 3),))
    90.0
    """
    covered = sum(
        sum(layer[expert] for expert in each.kept)
        for layer, each in zip(counts, slots, strict=True)
    )
    return round(float(100 * Fraction(covered, sum(map(sum, counts)) or 1)), 2)


def overlap_percent(one: Counts, other: Counts) -> float:
    """Return the share of routing that two runs of the same tokens have in common.

    >>> overlap_percent(((6, 4),), ((5, 5),))
    90.0
    """
    common = sum(
        min(pair)
        for ours, theirs in zip(one, other, strict=True)
        for pair in zip(ours, theirs, strict=True)
    )
    return round(float(100 * Fraction(common, sum(map(sum, other)) or 1)), 2)


def _dense(pairs: Sequence[tuple[int, int]], experts: int) -> tuple[int, ...]:
    found = dict(pairs)
    return tuple(found.get(expert, 0) for expert in range(experts))
