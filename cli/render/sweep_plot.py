"""Draw a sweep with characters: memory against context by setting, speed against memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from string import ascii_letters
from typing import NamedTuple

from memfit.cli.render.chart import ASCII_MARKS, LEAST_WIDTH, UNICODE_MARKS, stacked_bar
from memfit.cli.render.document import Chart
from memfit.cli.render.views.tune_text import settings_without_context
from memfit.estimators.base.units import Units, format_bytes
from memfit.probes.result import Point, TuneResult

_MOST_WIDTH = 100
_HEIGHT = 10
_SEVERAL = "+"


class _Dot(NamedTuple):
    """A measured point; points with the same settings share a letter."""

    letter: str
    point: Point


def plots(result: TuneResult, units: Units) -> tuple[Chart, ...]:
    """Return the charts of the measured points, none without such points."""
    measured = [p for p in result.points if p.status == "measured" and p.wired_limit_bytes is None]
    if not measured:
        return ()
    dots = _lettered(measured)
    prefill = [(d, d.point.speed.prefill_tokens_per_second) for d in dots if d.point.speed]
    decode = [
        (d, rate)
        for d in dots
        if d.point.speed and (rate := d.point.speed.decode_tokens_per_second) is not None
    ]
    return (
        Chart(partial(_memory, dots, units)),
        *(Chart(partial(_speed, "Prefill", prefill, units)) for _ in prefill[:1]),
        *(Chart(partial(_speed, "Decode", decode, units)) for _ in decode[:1]),
    )


def _lettered(points: Sequence[Point]) -> list[_Dot]:
    """The points sorted by setting, then by context."""
    names = dict.fromkeys(settings_without_context(point.workload) for point in points)
    letters = dict(zip(names, chain(ascii_letters, repeat("*")), strict=False))
    dots = [_Dot(letters[settings_without_context(p.workload)], p) for p in points]
    order = list(names)
    return sorted(
        dots,
        key=lambda dot: (
            order.index(settings_without_context(dot.point.workload)),
            dot.point.workload.prompt_tokens,
        ),
    )


def _memory(dots: list[_Dot], units: Units, width: int, ascii_only: bool) -> Iterator[str]:
    marks = ASCII_MARKS if ascii_only else UNICODE_MARKS
    yield f"Memory against context: {marks[0]} weights  {marks[1]} caches  {marks[2]} workspace"
    whole = max(dot.point.peak_bytes or 0 for dot in dots)
    last = ""
    for dot in dots:
        if dot.letter != last:
            yield f"{dot.letter}  {settings_without_context(dot.point.workload)}"
            last = dot.letter
        tokens, peak = dot.point.workload.prompt_tokens, dot.point.peak_bytes or 0
        label = f"{tokens:>10} tokens {format_bytes(peak, units):>10} "
        room = max(LEAST_WIDTH, min(width, _MOST_WIDTH) - len(label) - 1)
        yield (label + stacked_bar(_parts(dot.point, peak), max(whole, 1), room, marks)).rstrip()


def _parts(point: Point, peak: int) -> tuple[int, int, int]:
    """Bytes of weights, caches and the rest of the peak."""
    figures = {figure.name: figure.measured_bytes or 0 for figure in point.figures}
    weights, caches = figures.get("active", 0), figures.get("kv", 0) + figures.get("ssm", 0)
    return weights, caches, peak - weights - caches


def _speed(
    phase: str, rates: list[tuple[_Dot, float]], units: Units, width: int, ascii_only: bool
) -> Iterator[str]:
    """Tokens per second upwards from zero, memory to the right from the least to the most."""
    most = max(rate for _, rate in rates)
    sizes = [dot.point.peak_bytes or 0 for dot, _ in rates]
    least, span = min(sizes), max(sizes) - min(sizes)
    label = f"{most:.1f} "
    room = max(LEAST_WIDTH, min(width, _MOST_WIDTH) - len(label) - 2)
    rows = [[" "] * room for _ in range(_HEIGHT)]
    for (dot, rate), size in zip(rates, sizes, strict=True):
        row = rows[_HEIGHT - 1 - int(rate / most * (_HEIGHT - 1))]
        column = (size - least) * (room - 1) // max(span, 1)
        row[column] = dot.letter if row[column] in (" ", dot.letter) else _SEVERAL
    yield f"{phase}, tokens/s against memory: letters as above, {_SEVERAL} several"
    edge = "|" if ascii_only else "│"
    for index, row in enumerate(rows):
        side = label if index == 0 else "0 " if index == _HEIGHT - 1 else ""
        yield f"{side:>{len(label)}}{edge}{''.join(row)}".rstrip()
    left, right = axis_ends(least, least + span, units)
    yield f"{'':>{len(label)}} {left}{right:>{room - len(left)}}".rstrip()


def axis_ends(least: int, most: int, units: Units) -> tuple[str, str]:
    """Return the labels of an axis, in bytes when rounded sizes would be equal."""
    left, right = format_bytes(least, units), format_bytes(most, units)
    if least == most:
        return left, ""
    return (left, right) if left != right else (f"{least} B", f"{most} B")
