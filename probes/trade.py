"""What speed costs in memory, in words: measured points that differ in one setting.

trade(points, units) -> tuple[str, ...]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from memfit.estimators.units import Units, format_bytes
from memfit.estimators.workload import Workload
from memfit.probes.result import Point, Speed

# Repeats of one setting lie as far apart: what is closer counts as equal.
_ALIKE_PERCENT = 5


def trade(points: Sequence[Point], units: Units = Units.GB) -> tuple[str, ...]:
    """Return a sentence for each setting that was measured with more than one value.

    Where several sets of points are alike in all else, that of the longest prompt speaks.
    """
    return tuple(_sentences(points, units))


class _Measured(NamedTuple):
    setting: int | None
    nbytes: int
    rate: float  # tokens a second


class _Axis(NamedTuple):
    """A setting, and the speed that it moves."""

    setting: Callable[[Workload], int | None]
    rest: Callable[[Workload], Workload]  # the workload without it
    rate: Callable[[Speed], float | None]


_STEP = _Axis(
    lambda workload: workload.prefill_step,
    lambda workload: replace(workload, prefill_step=Workload(prompt_tokens=1).prefill_step),
    lambda speed: speed.prefill_tokens_per_second,
)
_BITS = _Axis(
    lambda workload: workload.kv_bits,
    lambda workload: replace(workload, kv_bits=None, quantized_kv_start=0),
    lambda speed: speed.decode_tokens_per_second,
)
_CONTEXT = _Axis(
    lambda workload: workload.prompt_tokens,
    lambda workload: replace(workload, prompt_tokens=1),
    lambda speed: speed.decode_tokens_per_second,
)


def _sentences(points: Sequence[Point], units: Units) -> Iterator[str]:
    if steps := _varied(points, _STEP):
        yield f"prefill step: {_speed_for_memory(steps, 'reads', units)}"
    if bits := _varied(points, _BITS):
        yield f"KV bits: {_speed_for_memory(bits, 'writes', units)}"
    yield from _wired(points, units)
    if contexts := _varied(points, _CONTEXT):
        short, long = min(contexts), max(contexts)
        yield (
            f"context: {long.setting} tokens take {_more(short, long, units)} than {short.setting},"
            f" and are continued at {long.rate:.1f} tokens/s instead of {short.rate:.1f}"
        )


def _wired(points: Sequence[Point], units: Units) -> Iterator[str]:
    """What the wired limit did for the speed of the workload that was run with and without it."""
    without = {p.workload: p.speed for p in points if p.speed and p.wired_limit_bytes is None}
    for point in points:
        speed, before = point.speed, without.get(point.workload)
        if speed and before and point.wired_limit_bytes is not None:
            written, was = speed.decode_tokens_per_second, before.decode_tokens_per_second
            decode = f", writes {written:.1f} instead of {was:.1f}" if written and was else ""
            yield (
                f"wired limit: with {format_bytes(point.wired_limit_bytes, units)} it reads"
                f" {speed.prefill_tokens_per_second:.1f} tokens/s instead of"
                f" {before.prefill_tokens_per_second:.1f}{decode}"
            )


def _varied(points: Sequence[Point], axis: _Axis) -> list[_Measured]:
    """The points that differ in the setting alone, empty when fewer than two do."""
    groups: dict[Workload, list[_Measured]] = {}
    for point in points:
        rate = axis.rate(point.speed) if point.speed else None
        if rate and point.peak_bytes and point.wired_limit_bytes is None:
            found = _Measured(axis.setting(point.workload), point.peak_bytes, rate)
            groups.setdefault(axis.rest(point.workload), []).append(found)
    several = (rest for rest, found in groups.items() if len(found) > 1)
    longest = max(several, key=lambda rest: rest.prompt_tokens, default=None)
    return groups[longest] if longest else []


def _speed_for_memory(measured: list[_Measured], verb: str, units: Units) -> str:
    """The fastest against the smallest of several settings."""
    least = min(measured, key=lambda each: each.nbytes)
    fastest = max(measured, key=lambda each: (each.rate, -each.nbytes))
    rate = f"{fastest.rate:.1f} tokens/s"
    if least is fastest:
        size = format_bytes(least.nbytes, units)
        return f"{_name(least)} is the smallest, {size}, and {verb} the fastest, {rate}"
    gain = round(100 * (fastest.rate / least.rate - 1))
    costs = f"takes {_more(least, fastest, units)} than {_name(least)}"
    if gain < _ALIKE_PERCENT:
        return f"{_name(fastest)} {costs} and {verb} no faster, {rate}"
    return f"{_name(fastest)} {verb} {gain} % faster, {rate}, and {costs}"


def _more(least: _Measured, most: _Measured, units: Units) -> str:
    more = most.nbytes - least.nbytes
    if more <= 0:
        return "no more memory"
    return f"{format_bytes(more, units)} ({round(100 * more / least.nbytes)} %) more"


def _name(measured: _Measured) -> str:
    return "unquantised" if measured.setting is None else str(measured.setting)
