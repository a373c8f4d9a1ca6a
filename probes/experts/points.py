"""What routers chose, and what was planned and measured of a model with some of its experts."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.experts.routing import ChosenSlots, RoutingProfile
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.estimators.weights.expert_slots import ExpertLayer
from memfit.probes.agreement import Agreement
from memfit.probes.experts.planned import Plan, PlannedBytes
from memfit.probes.experts.result import ExpertsPoint, PlannedFigure, SlotTraffic
from memfit.probes.experts.runner import ExpertLayerInfo, LayerRouting
from memfit.probes.result import PointStatus
from memfit.probes.speed import median_speed

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


class Discovered(NamedTuple):
    """What the run without experts found."""

    loaded: Loaded
    layers: tuple[ExpertLayer, ...]
    largest_bytes: int
    """Of one stacked tensor."""
    profile: RoutingProfile
    measured: Counts
    """Tokens that used each expert in the measured prompts."""

    @property
    def expert_bytes(self) -> int:
        return sum(layer.slot_bytes * layer.experts for layer in self.layers)

    def kept_bytes(self, capacity: int) -> int:
        return self.loaded.weights_bytes + sum(n.slot_bytes * capacity for n in self.layers)


class SlotRuns(NamedTuple):
    """What one process measured."""

    loaded: Loaded
    warm_up: Run
    runs: Sequence[Run]
    agreement: Agreement | None = None


def point_of(
    slots: Sequence[ChosenSlots],
    counts: Counts,
    plan: Plan | None,
    measured: SlotRuns | None = None,
    *,
    workload: Workload,
    status: PointStatus = "measured",
    reason: str | None = None,
    measurement_id: str | None = None,
    wired_limit_bytes: int | None = None,
) -> ExpertsPoint:
    """Return the point of some slots; ``counts`` are the tokens that used each expert."""
    loaded, runs = (measured.loaded, measured.runs) if measured else (None, ())
    kept = [len(each.kept) for each in slots]
    planned = plan.at(kept) if plan else PlannedBytes(None, None, None, None)
    pinned = sum(len(each.pinned) for each in slots)
    profiled = sum(each.profiled for each in slots)
    taken = (measured.warm_up, *runs) if measured else ()
    peaks = [(run.prefill_peak_bytes, run.decode_peak_bytes) for run in taken]
    prefill, decode = map(max, zip(*peaks, strict=True)) if peaks else (None, None)
    return ExpertsPoint(
        capacity=kept[0],
        status=status,
        reason=reason,
        pinned_slots=pinned,
        profiled_slots=profiled,
        filler_slots=sum(kept) - pinned - profiled,
        coverage_percent=coverage_percent(slots, counts),
        weights=PlannedFigure(planned.weights, loaded.weights_bytes if loaded else None),
        startup=PlannedFigure(planned.startup, loaded.peak_bytes if loaded else None),
        prefill_peak=PlannedFigure(planned.prefill_peak, prefill),
        decode_peak=PlannedFigure(planned.decode_peak, decode),
        load_ns=loaded.load_ns if loaded else None,
        speed=median_speed(workload, runs),
        prefill=_traffic("prefill", runs),
        decode=_traffic("decode", runs),
        agreement=measured.agreement if measured else None,
        measurement_id=measurement_id,
        wired_limit_bytes=wired_limit_bytes,
    )


def _traffic(phase: str, runs: Sequence[Run]) -> SlotTraffic | None:
    if not runs:
        return None
    totals = {
        name: sum(run.value(f"{phase}_{name}") or 0 for run in runs)
        for name in SlotTraffic.__struct_fields__
    }
    return SlotTraffic(**totals)


def _dense(pairs: Sequence[tuple[int, int]], experts: int) -> tuple[int, ...]:
    counts = dict(pairs)
    return tuple(counts.get(expert, 0) for expert in range(experts))
