"""Whether fewer experts pay, and how many are enough."""

from collections.abc import Iterator, Sequence

from memfit.estimators.base.units import Units, format_bytes
from memfit.probes.experts.result import ExpertsPoint, Offloading


def offloading(
    full: ExpertsPoint | None,
    points: Sequence[ExpertsPoint],
    *,
    experts: int,
    slowdown_percent: int,
    agreement_percent: int,
    units: Units,
) -> Offloading:
    """Return the smallest capacity that is fast enough and agrees well enough.

    Speeds are compared with the full model's, or, where that was not run, with the fastest point.
    """
    measured = [point for point in points if point.status == "measured"]
    speeds = [_speed(point) for point in ([full] if full else measured)]
    fastest = max((speed for speed in speeds if speed is not None), default=None)
    enough = None
    if fastest is not None:
        floor = fastest * (100 - slowdown_percent) / 100
        enough = next(
            (
                point
                for point in sorted(measured, key=lambda each: each.capacity)
                if (_speed(point) or 0) >= floor
                # Without a full model nothing contradicts.
                and (point.agreement is None or point.agreement.is_enough(agreement_percent))
            ),
            None,
        )
    is_known = fastest is not None and bool(measured)
    pays = enough is not None and enough.capacity < experts if is_known else None
    if full is None and enough is not None:
        pays = True  # the whole model does not run here
    reasons = _reasons(full, measured, enough, fastest, experts, units)
    return Offloading(
        pays=pays,
        capacity=enough.capacity if enough else None,
        startup_bytes=enough.startup.measured_bytes if enough else None,
        slowdown_percent=slowdown_percent,
        agreement_percent=agreement_percent,
        reasons=tuple(reasons),
    )


def _reasons(
    full: ExpertsPoint | None,
    measured: Sequence[ExpertsPoint],
    enough: ExpertsPoint | None,
    fastest: float | None,
    experts: int,
    units: Units,
) -> Iterator[str]:
    if not measured or fastest is None:
        yield "no capacity was measured"
        return
    if enough is None:
        best = max(measured, key=lambda each: (_speed(each) or 0, each.capacity))
        yield (
            f"the fastest, {best.capacity} experts, decodes {_rate(best)} tokens/s of {fastest:.1f}"
            f"{_agreement(best)}"
        )
        return
    yield (
        f"{enough.capacity} experts decode {_rate(enough)} tokens/s of {fastest:.1f}"
        f"{_agreement(enough)}"
    )
    whole = full and full.weights.measured_bytes
    if whole and enough.weights.measured_bytes is not None:
        less = whole - enough.weights.measured_bytes
        yield (
            f"they take {format_bytes(less, units)} less than all {experts}"
            f" ({100 * less / whole:.0f} %)"
        )
    if enough.startup.measured_bytes is not None:
        yield f"start-up takes {format_bytes(enough.startup.measured_bytes, units)}"


def _speed(point: ExpertsPoint) -> float | None:
    """Decode speed, or that of prefill when nothing is generated."""
    if point.speed is None:
        return None
    return point.speed.decode_tokens_per_second or point.speed.prefill_tokens_per_second


def _rate(point: ExpertsPoint) -> str:
    return f"{_speed(point) or 0:.1f}"


def _agreement(point: ExpertsPoint) -> str:
    found = point.agreement
    return f", {found.same_tokens} of {found.tokens} tokens are equal" if found else ""
