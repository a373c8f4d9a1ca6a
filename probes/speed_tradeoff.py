"""Speed against memory as sentences, from measured points that differ in one setting.

    speed_tradeoffs(points, units) -> tuple[str, ...]
    rounded_rate(tokens) -> str

Two speeds differ when their distance is larger than the spread of the repeats of any compared
point. Speeds of a single run are not compared.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.probes.result import Point

_ONCE = "speeds of single runs are not compared"


def speed_tradeoffs(points: Sequence[Point], units: Units = Units.GB) -> tuple[str, ...]:
    """Return a sentence for each setting that was measured with more than one value.

    When several groups of points differ in that setting only, the longest prompt's group is used.
    """
    return tuple(_sentences(points, units))


def rounded_rate(tokens: float) -> str:
    """Return tokens per second with the digits that repeat between runs."""
    return f"{tokens:.1f}" if tokens < 100 else f"{tokens:.0f}"


class _Measured(NamedTuple):
    setting: int | None
    nbytes: int
    rate: float
    """Tokens per second."""
    spread: float | None
    """Spread of the repeats; None for a single run."""


class _Tradeoff(NamedTuple):
    """A setting, and the speed that it changes."""

    setting: Callable[[Workload], int | None]
    rest: Callable[[Workload], Workload]
    """The workload with the setting removed."""
    phase: Literal["prefill", "decode"]
    verb: str


_STEP = _Tradeoff(
    lambda workload: workload.prefill_step,
    lambda workload: replace(workload, prefill_step=Workload(prompt_tokens=1).prefill_step),
    "prefill",
    "reads",
)
_BITS = _Tradeoff(
    lambda workload: workload.kv_bits,
    lambda workload: replace(workload, kv_bits=None, quantized_kv_start=0),
    "decode",
    "writes",
)
_CONTEXT = _BITS._replace(
    setting=lambda workload: workload.prompt_tokens,
    rest=lambda workload: replace(workload, prompt_tokens=1),
)


def _sentences(points: Sequence[Point], units: Units) -> Iterator[str]:
    if steps := _varied(points, _STEP):
        yield f"prefill step: {_speed_for_memory(steps, _STEP.verb, units)}"
    if bits := _varied(points, _BITS):
        yield f"KV bits: {_speed_for_memory(bits, _BITS.verb, units)}"
    yield from _wired(points, units)
    if contexts := _varied(points, _CONTEXT):
        short, long = min(contexts), max(contexts)
        costs = f"{long.setting} tokens take {_more(short, long, units)} than {short.setting}"
        yield f"context: {costs}; {_compared(short, long, _CONTEXT.verb)}"


def _wired(points: Sequence[Point], units: Units) -> Iterator[str]:
    """Compare the speed of a workload with and without the wired limit."""
    without = {p.workload: p for p in points if p.wired_limit_bytes is None}
    for point in points:
        before = without.get(point.workload)
        if before is None or point.wired_limit_bytes is None:
            continue
        limit = format_bytes(point.wired_limit_bytes, units)
        for tradeoff in (_STEP, _BITS):
            was, now = _measured(before, tradeoff), _measured(point, tradeoff)
            if was and now:
                yield f"wired limit: with {limit}, {_compared(was, now, tradeoff.verb)}"


def _compared(was: _Measured, now: _Measured, verb: str) -> str:
    """Two speeds; they differ only when the spread of the repeats is smaller."""
    spread = _largest_spread((was, now))
    if spread is None:
        return _ONCE
    rates = f"it {verb} {rounded_rate(now.rate)} tokens/s instead of {rounded_rate(was.rate)}"
    if abs(now.rate - was.rate) > spread:
        return rates
    return f"{rates}, no clear difference: repeats differ by {rounded_rate(spread)}"


def _largest_spread(measured: Sequence[_Measured]) -> float | None:
    """The largest spread of the repeats of one point; None when a point has no repeats."""
    spreads = [each.spread for each in measured if each.spread is not None]
    return max(spreads) if len(spreads) == len(measured) else None


def _varied(points: Sequence[Point], tradeoff: _Tradeoff) -> list[_Measured]:
    """The points that differ in this setting only, empty when there are fewer than two."""
    groups: dict[Workload, list[_Measured]] = {}
    for point in points:
        found = _measured(point, tradeoff)
        if found and point.wired_limit_bytes is None:
            groups.setdefault(tradeoff.rest(point.workload), []).append(found)
    several = (rest for rest, found in groups.items() if len(found) > 1)
    longest = max(several, key=lambda rest: rest.prompt_tokens, default=None)
    return groups[longest] if longest else []


def _measured(point: Point, tradeoff: _Tradeoff) -> _Measured | None:
    rate = getattr(point.speed, f"{tradeoff.phase}_tokens_per_second", None)
    if not rate or not point.peak_bytes:
        return None
    spread = getattr(point.speed, f"{tradeoff.phase}_spread") if point.repeats > 1 else None
    return _Measured(tradeoff.setting(point.workload), point.peak_bytes, rate, spread)


def _speed_for_memory(measured: list[_Measured], verb: str, units: Units) -> str:
    """Compare the fastest setting with the smallest, else say that the smallest is as fast."""
    least = min(measured, key=lambda each: each.nbytes)
    most = max(measured, key=lambda each: each.nbytes)
    fastest = max(measured, key=lambda each: (each.rate, -each.nbytes))
    spread = _largest_spread(measured)
    if spread is None:
        return f"{_name(most)} takes {_more(least, most, units)} than {_name(least)}; {_ONCE}"
    if fastest.rate - least.rate > spread:
        gain = round(100 * (fastest.rate / least.rate - 1))
        return (
            f"{_name(fastest)} {verb} {gain} % faster, {rounded_rate(fastest.rate)} tokens/s, and"
            f" takes {_more(least, fastest, units)} than {_name(least)}"
        )
    size, rate = format_bytes(least.nbytes, units), rounded_rate(least.rate)
    return (
        f"{_name(least)} takes the least, {size}, and {verb} {rate} tokens/s; no other is clearly"
        f" faster: repeats differ by {rounded_rate(spread)}"
    )


def _more(least: _Measured, most: _Measured, units: Units) -> str:
    more = most.nbytes - least.nbytes
    if more <= 0:
        return "no more memory"
    return f"{format_bytes(more, units)} ({round(100 * more / least.nbytes)} %) more"


def _name(measured: _Measured) -> str:
    return "unquantised" if measured.setting is None else str(measured.setting)
