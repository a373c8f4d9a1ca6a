"""Measure many workloads one after another; a failed one does not end the sweep.

sweep(session, workloads, checkpoint=...) -> SweepOutcome
"""

from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.progress import Progress, reported
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.experiments.points import STEPS, Points
from memfit.probes.preflight import obstacle, require_room
from memfit.probes.result import Point
from memfit.probes.sweep_checkpoint import SweepCheckpoint


class SweepInterrupted(KeyboardInterrupt):
    """The user stopped a sweep; finished measurements are saved."""


class SweepOutcome(NamedTuple):
    """The result of a sweep."""

    points: tuple[Point, ...]
    """One for each workload."""
    known: int
    """How many of them were measured by an earlier, unfinished sweep."""


def sweep(
    session: Points,
    workloads: Sequence[Workload],
    *,
    checkpoint: SweepCheckpoint,
) -> SweepOutcome:
    """Return a point for each workload: measured, skipped with the reason, or failed.

    The first workload is the one that the user asked for, and must run. Measurements listed in
    ``checkpoint`` are not repeated. A process that dies fails only its own point. The checkpoint
    is complete when no point failed; otherwise the same sweep measures the failed ones again.

    Raises:
        CheckpointError: when the weights do not match the config.
        UnsupportedError: when the first workload cannot run.
        RefusedError: when there is too little memory for the first workload.
        SweepInterrupted: on Ctrl-C; the message says how to continue.
    """
    force, units, progress = session.request.force, session.request.units, session.progress
    known = {each.workload: each for each in checkpoint.measured().values()}
    requested = workloads[0]
    if requested not in known and not force:
        require_room(session.sized, requested, units)
    reasons = {} if force else _obstacles(session.sized, workloads, units, progress)
    left = [work for work in workloads if work not in known and work not in reasons]
    points: dict[Workload, Point] = {}
    steps = sum(_cost(work) for work in left)
    try:
        with reported(progress, _title(len(left), len(known)), steps):
            for work in left:
                points[work] = _measured(session, work, must_run=work == requested)
                if id := points[work].measurement_id:
                    _add_to_checkpoint(session, checkpoint, id)
    except KeyboardInterrupt:
        done = len(checkpoint.measured())
        raise SweepInterrupted(
            f"interrupted: {done} of {len(workloads)} points are measured and saved; the same"
            " command continues from there"
        ) from None
    if all(point.status != "failed" for point in points.values()):
        checkpoint.is_complete = True
    for work in workloads:
        if measurement := known.get(work):
            points[work] = session.from_measurement(measurement)
        elif work not in points:
            points[work] = session.skipped(work, reasons[work])
    return SweepOutcome(tuple(points[work] for work in workloads), len(known))


def _obstacles(
    sized: SizedModel, workloads: Sequence[Workload], units: Units, progress: Progress
) -> dict[Workload, str]:
    """Why workloads are skipped, for those that are; a trace takes a second or more."""
    found = {}
    with reported(progress, f"estimating {len(workloads)} points", len(workloads)):
        for work in workloads:
            if reason := _obstacle(sized, work, units):
                found[work] = reason
            progress.advance()
    return found


def _obstacle(sized: SizedModel, workload: Workload, units: Units) -> str | None:
    limit = sized.model.max_context
    if limit and workload.total_tokens > limit:
        return f"more than the model's own limit of {limit} tokens"
    found = obstacle(sized, workload, units)
    return str(found) if found else None


def _measured(session: Points, workload: Workload, progress: Progress, *, must_run: bool) -> Point:
    reported = 0

    def on_run() -> None:
        nonlocal reported
        reported += workload.total_tokens
        session.progress.advance(workload.total_tokens)

    session.on_run = on_run
    point = session.measure(workload) if must_run else session.measure_if_supported(workload)
    session.progress.advance(_cost(workload) - reported)  # the rest, when a point ended early
    return point


def _add_to_checkpoint(session: Points, checkpoint: SweepCheckpoint, id: str) -> None:
    try:
        checkpoint.add(id)
    except InputError as error:
        session.warn_unsaved("the measurement", error)


def _cost(workload: Workload) -> int:
    """The progress steps of a point: its time grows with the tokens."""
    return STEPS * workload.total_tokens


def _title(left: int, known: int) -> str:
    return f"measuring {left} points" + (f", {known} were measured before" if known else "")
