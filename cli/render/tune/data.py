"""A tune result as CSV: the fields of the result, nothing computed."""

from collections.abc import Iterator
from typing import Any

from memfit.cli.render.data import csv_text
from memfit.probes.figures import NAMES
from memfit.probes.result import Point, TuneResult

_SETTINGS = (
    "prompt_tokens",
    "max_tokens",
    "prefill_step",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "max_kv_size",
)
_OF_POINT = ("wired_limit_bytes", "status", "repeats", "measurement_id")
_SPEEDS = (
    "first_token_ns",
    "first_token_spread_ns",
    "prefill_tokens_per_second",
    "prefill_spread",
    "decode_tokens_per_second",
    "decode_spread",
)


def to_csv(result: TuneResult) -> str:
    """Return one line for each point: its settings, then every figure in bytes, both values."""
    columns = (f"{name}_{side}_bytes" for name in NAMES for side in ("estimated", "measured"))
    headings = (*_SETTINGS, *_OF_POINT, *columns, *_SPEEDS, "reason")
    return csv_text((headings, *map(_cells, result.points)))


def _cells(point: Point) -> Iterator[Any]:
    yield from (getattr(point.workload, name) for name in _SETTINGS)
    yield from (getattr(point, name) for name in _OF_POINT)
    figures = {figure.name: figure for figure in point.figures}
    for name in NAMES:
        figure = figures.get(name)
        yield figure.estimated_bytes if figure else None
        yield figure.measured_bytes if figure else None
    yield from (getattr(point.speed, name, None) for name in _SPEEDS)
    yield point.reason
