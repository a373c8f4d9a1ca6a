"""Points of a sweep as after a run, with peaks and speeds chosen by a test."""

from memfit.estimators.base.workload import Workload
from memfit.probes.result import Point
from memfit.probes.speed import Speed


def point(
    workload: Workload,
    peak_bytes: int,
    *,
    reads: float = 100.0,
    writes: float | None = 10.0,
    spread: float = 0.0,
) -> Point:
    return Point(
        workload=workload,
        status="measured",
        reason=None,
        repeats=3,
        estimated_peak_bytes=peak_bytes,
        peak_bytes=peak_bytes,
        figures=(),
        speed=Speed(
            first_token_ns=1,
            prefill_tokens_per_second=reads,
            decode_tokens_per_second=writes,
            prefill_spread=spread,
            decode_spread=None if writes is None else spread,
        ),
        measurement_id=None,
    )


def unmeasured(workload: Workload) -> Point:
    return Point(
        workload=workload,
        status="failed",
        reason="killed",
        repeats=0,
        estimated_peak_bytes=None,
        peak_bytes=None,
        figures=(),
        speed=None,
        measurement_id=None,
    )
