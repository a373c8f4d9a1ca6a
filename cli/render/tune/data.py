"""A tuning as JSON and CSV: the fields of the result, nothing computed."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

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


def to_json(result: TuneResult) -> str:
    """Return the mapping of docs/schema/tune.schema.json as text that ends with a line feed."""
    data = asdict(result)
    ordered = {"schema": data.pop("schema"), **data}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"


def to_csv(result: TuneResult) -> str:
    """Return one line a point: its settings, then both sides of every figure in bytes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    sides = (f"{name}_{side}_bytes" for name in NAMES for side in ("estimated", "measured"))
    writer.writerow((*_SETTINGS, *_OF_POINT, *sides, *_SPEEDS, "reason"))
    writer.writerows(tuple(_cells(point)) for point in result.points)
    return buffer.getvalue()


def _cells(point: Point) -> Iterator[Any]:
    yield from (_cell(getattr(point.workload, name)) for name in _SETTINGS)
    yield from (_cell(getattr(point, name)) for name in _OF_POINT)
    figures = {figure.name: figure for figure in point.figures}
    for name in NAMES:
        figure = figures.get(name)
        yield _cell(figure.estimated_bytes if figure else None)
        yield _cell(figure.measured_bytes if figure else None)
    yield from (_cell(getattr(point.speed, name, None)) for name in _SPEEDS)
    yield _cell(point.reason)


def _cell(value: Any) -> Any:
    return "" if value is None else value
