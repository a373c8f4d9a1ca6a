"""The recommended wired limit tried: the workload again with it set, or its figures alone.

with_wired(bench, points, recommendation, units) -> points and recommendation, with the trial's
because(recommendation, reason) -> Recommendation    of a limit that is not tried
"""

from dataclasses import replace

from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.wired_limit import wired_limit
from memfit.estimators.results.estimate import Recommendation
from memfit.probes.bench import Bench
from memfit.probes.measured_recommendation import by_measurement, line_of
from memfit.probes.result import Point


def with_wired(
    bench: Bench, points: tuple[Point, ...], recommendation: Recommendation, units: Units
) -> tuple[tuple[Point, ...], Recommendation]:
    """Return the points with that of the first workload under the limit, on Metal.

    Elsewhere there is no limit to set: the recommendation says what it would be, and that nothing
    was touched. The process that runs the workload puts the limit back, and has none when it ends.
    """
    device, asked = bench.sized.device, points[0]
    if device is None or asked.status != "measured":
        return points, because(recommendation, "not tried: the workload was not measured")
    if device.backend != "metal":
        return points, _on_paper(bench, points, recommendation, device, units)
    if (limit := recommendation.wired_limit_bytes) is None:
        return points, because(recommendation, "none is recommended, so none was tried")
    return (*points, bench.measure(asked.workload, wired_limit_bytes=limit)), recommendation


def because(recommendation: Recommendation, reason: str) -> Recommendation:
    """Return a recommendation that says why its wired limit is what it is."""
    reasons = (*recommendation.reasons, f"wired limit: {reason}")
    return replace(recommendation, reasons=reasons)


def _on_paper(
    bench: Bench,
    points: tuple[Point, ...],
    recommendation: Recommendation,
    device: Device,
    units: Units,
) -> Recommendation:
    asked, context = points[0].workload, recommendation.context_tokens
    workload = replace(asked, prompt_tokens=context, max_tokens=0) if context else asked
    sized = by_measurement(bench.sized, points, line_of(points))
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
    return replace(because(recommendation, reason), wired_limit_bytes=limit)
