"""Many workloads measured one after another, whatever becomes of each.

sweep(bench, workloads, partial=..., force=..., units=..., sink=...) -> tuple[Point, ...]
"""

from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.progress import Progress
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.bench import REPEATS, Bench
from memfit.probes.preflight import obstacle, require_room
from memfit.probes.result import Point
from memfit.probes.sweep_checkpoint import PartialSweep

_STEPS = REPEATS + 1  # of a point: its runs, and the one by mlx-swift-lm's rule


class SweepInterrupted(KeyboardInterrupt):
    """Somebody stopped a sweep; what was measured is kept."""


class Swept(NamedTuple):
    """A point for each workload, and how many of them were measured before."""

    points: tuple[Point, ...]
    known: int


def sweep(
    bench: Bench,
    workloads: Sequence[Workload],
    *,
    partial: PartialSweep,
    force: bool,
    units: Units,
    progress: Progress,
) -> Swept:
    """Return a point for each workload: measured, skipped with the reason, or failed.

    The first workload is the one that was asked for, and has to run. What ``partial`` has is not
    measured again. A process that dies fails its own point; only when no point has failed is
    ``partial`` forgotten, so that the same sweep measures those again.

    Raises:
        CheckpointError: when the weights do not match the config.
        UnsupportedError: when the first workload cannot be run.
        RefusedError: when there is no room for the first.
        SweepInterrupted: on Ctrl-C, with what to do next.
    """
    known = {each.workload: each for each in partial.measured().values()}
    asked = workloads[0]
    if asked not in known and not force:
        require_room(bench.sized, asked, units)
    reasons = {} if force else _obstacles(bench.sized, workloads, units, progress)
    left = [work for work in workloads if work not in known and work not in reasons]
    points: dict[Workload, Point] = {}
    progress.begin(_title(len(left), len(known)), sum(_cost(work) for work in left))
    try:
        for work in left:
            points[work] = _measured(bench, work, progress, must_run=work == asked)
            if id := points[work].measurement_id:
                _note(bench, partial, id)
    except KeyboardInterrupt:
        raise SweepInterrupted(_resumption(len(partial.measured()), len(workloads))) from None
    finally:
        progress.end()
    if all(point.status != "failed" for point in points.values()):
        partial.finish()
    every = (
        points.get(work) or _not_run(bench, work, known.get(work), reasons.get(work, ""))
        for work in workloads
    )
    return Swept(tuple(every), len(known))


def _obstacles(
    sized: SizedModel, workloads: Sequence[Workload], units: Units, progress: Progress
) -> dict[Workload, str]:
    """Why workloads are not to be run, of those that are not; a trace takes a second or more."""
    found = {}
    progress.begin(f"estimating {len(workloads)} points", len(workloads))
    try:
        for work in workloads:
            if reason := _obstacle(sized, work, units):
                found[work] = reason
            progress.advance()
    finally:
        progress.end()
    return found


def _obstacle(sized: SizedModel, workload: Workload, units: Units) -> str | None:
    limit = sized.model.max_context
    if limit and workload.total_tokens > limit:
        return f"more than the model's own limit of {limit} tokens"
    found = obstacle(sized, workload, units)
    return str(found) if found else None


def _measured(bench: Bench, workload: Workload, progress: Progress, *, must_run: bool) -> Point:
    told = 0

    def tell() -> None:
        nonlocal told
        told += 1
        progress.advance(workload.total_tokens)

    bench.tell = tell
    point = bench.measure(workload) if must_run else bench.measure_if_supported(workload)
    progress.advance(_cost(workload) - told * workload.total_tokens)  # of a point that ended early
    return point


def _note(bench: Bench, partial: PartialSweep, id: str) -> None:
    try:
        partial.add(id)
    except InputError as error:
        bench.unkept = str(error)


def _cost(workload: Workload) -> int:
    """What a point takes of the whole: time goes with the tokens."""
    return _STEPS * workload.total_tokens


def _not_run(bench: Bench, workload: Workload, known: Measurement | None, reason: str) -> Point:
    return bench.recalled(known) if known else bench.skipped(workload, reason)


def _title(left: int, known: int) -> str:
    return f"measuring {left} points" + (f", {known} were before" if known else "")


def _resumption(done: int, points: int) -> str:
    return (
        f"interrupted: {done} of {points} points are measured and kept; the same command goes on"
        " from there"
    )
