"""Run the workload again with the recommended wired limit, or explain why not.

with_wired_trial(session, points, recommendation, units) -> points and recommendation
with_wired_reason(recommendation, reason) -> Recommendation
"""

from msgspec.structs import replace

from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.wired_limit import wired_limit
from memfit.estimators.results.advice import Advice, Recommendation
from memfit.probes.measured_recommendation import by_measurement, line_of
from memfit.probes.result import Point
from memfit.probes.session import MeasurementSession


def with_wired_trial(
    session: MeasurementSession,
    points: tuple[Point, ...],
    recommendation: Recommendation,
    units: Units,
) -> tuple[tuple[Point, ...], Recommendation]:
    """Return the points, on Metal with a further one: the first workload with the limit set.

    Other backends have no limit to set: the recommendation says what the limit would be, and that
    nothing was changed. The measuring process restores the limit after the run.
    """
    device, first = session.sized.device, points[0]
    if device is None or first.status != "measured":
        return points, with_wired_reason(recommendation, "not tried: the workload was not measured")
    if device.backend != "metal":
        return points, _without_wired_limit(session, points, recommendation, device, units)
    if (limit := recommendation.wired_limit_bytes.value) is None:
        return points, with_wired_reason(recommendation, "none is recommended, so none was tried")
    return (*points, session.measure(first.workload, wired_limit_bytes=limit)), recommendation


def with_wired_reason(recommendation: Recommendation, reason: str) -> Recommendation:
    advice = recommendation.wired_limit_bytes
    reasons = "; ".join(filter(None, (advice.reason, reason)))
    return replace(recommendation, wired_limit_bytes=replace(advice, reason=reasons))


def _without_wired_limit(
    session: MeasurementSession,
    points: tuple[Point, ...],
    recommendation: Recommendation,
    device: Device,
    units: Units,
) -> Recommendation:
    first, context = points[0].workload, recommendation.context_tokens.value
    workload = replace(first, prompt_tokens=context, max_tokens=0) if context else first
    sized = by_measurement(session.sized, points, line_of(points))
    figures, need = sized.figures_for(workload), sized.requirement(workload)
    limit = wired_limit(need.peak_bytes, device).nbytes
    caches = figures.kv.nbytes + figures.ssm_bytes
    workspace = figures.moment.nbytes - sized.resident_bytes - caches
    parts = {"weights": sized.resident_bytes, "caches": caches, "workspace": workspace}
    listed = ", ".join(f"{name} {format_bytes(size, units)}" for name, size in parts.items())
    reason = (
        f"{format_bytes(limit, units)} by policy alone for {workload.total_tokens}"
        f" tokens ({listed}, margin {format_bytes(sized.margin_bytes, units)}); the"
        f" {device.backend} backend has no wired limit, nothing was set"
    )
    return replace(recommendation, wired_limit_bytes=Advice("keep", limit, reason))
