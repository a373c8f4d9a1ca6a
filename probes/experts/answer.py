"""Whether fewer experts pay, and how many are enough."""

from collections.abc import Iterator, Sequence

from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.probes.experts.result import ExpertsPoint, Offloading

START_UP_PERCENT = 95
"""mlx-moe warns of a peak above this share of what Metal recommends."""


def start_up_warnings(
    points: Sequence[ExpertsPoint], working_set_bytes: int, units: Units
) -> Iterator[str]:
    """Yield a line for each start-up that takes more than mlx-moe accepts of the working set."""
    most = working_set_bytes * START_UP_PERCENT // 100
    for point in points:
        taken = point.startup.measured_bytes or 0
        if taken > most:
            yield (
                f"{point.capacity} experts: the start-up takes {format_bytes(taken, units)}, more"
                f" than {START_UP_PERCENT} % of the working set ({format_limit(most, units)})"
            )


def chosen_point(points: Sequence[ExpertsPoint], capacity: int | None) -> ExpertsPoint | None:
    """Return the measured point of the answer, else the largest, None when none was measured."""
    measured = [point for point in points if point.status == "measured"]
    largest = max(measured, key=lambda each: each.capacity, default=None)
    return next((each for each in measured if each.capacity == capacity), largest)


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
