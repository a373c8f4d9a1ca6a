"""The point of a capacity: what was planned and measured of a model with some of its experts."""

from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.experts.routing import ChosenSlots
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.probes.agreement import Agreement
from memfit.probes.experts.planned import Plan, PlannedBytes
from memfit.probes.experts.profiling import Counts, coverage_percent
from memfit.probes.experts.result import ExpertsPoint, PlannedFigure, SlotTraffic
from memfit.probes.result import PointStatus
from memfit.probes.speed import median_speed


class Measured(NamedTuple):
    """What one process measured."""

    loaded: Loaded
    warm_up: Run
    runs: Sequence[Run]
    agreement: Agreement | None = None


def point_of(
    slots: Sequence[ChosenSlots],
    counts: Counts,
    plan: Plan | None,
    measured: Measured | None = None,
    *,
    workload: Workload,
    status: PointStatus = "measured",
    reason: str | None = None,
    measurement_id: str | None = None,
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
    )


def _traffic(phase: str, runs: Sequence[Run]) -> SlotTraffic | None:
    if not runs:
        return None
    totals = {
        name: sum(run.value(f"{phase}_{name}") or 0 for run in runs)
        for name in SlotTraffic.__struct_fields__
    }
    return SlotTraffic(**totals)
