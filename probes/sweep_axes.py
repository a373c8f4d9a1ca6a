"""Turn texts such as ``kv-bits=none,8,4`` into the workloads that a sweep measures.

parse_axis("context=1k,4k") -> SweepAxis
sweep_workloads(axes, requested, quantized_kv_start=0) -> tuple[Workload, ...]
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import KV_BITS, Workload

MAX_POINTS = 256
_MAX_TEXT = 4096
_NONE = "none"

Value = TypeVar("Value")


class SweepAxis(NamedTuple):
    """One setting and its values, each once, in the given order."""

    name: str
    values: tuple[int | None, ...]


def parse_axis(text: str) -> SweepAxis:
    """Return the axis of a text such as ``prefill-step=256,512``.

    Raises:
        InputError: when the setting cannot be swept, or a value cannot be read or is given twice.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or name not in _SETTINGS or len(text) > _MAX_TEXT:
        *first, last = (setting.example for setting in _SETTINGS.values())
        raise InputError(f"{printable(text)}: not a sweep; write {', '.join(first)} or {last}")
    axis = SweepAxis(name, tuple(_read(name, value.strip()) for value in values.split(",")))
    if repeated := _repeated(axis.values):
        raise InputError(f"{name}: {_NONE if repeated[0] is None else repeated[0]} is given twice")
    return axis


def sweep_workloads(
    axes: Sequence[SweepAxis], requested: Workload, *, quantized_kv_start: int = 0
) -> tuple[Workload, ...]:
    """Return every combination of the axes' values; the last axis changes fastest.

    Quantised caches of the sweep start at ``quantized_kv_start``, by default the first token:
    mlx-lm's default of 5000 would not quantise the caches of short prompts.

    Raises:
        InputError: when an axis is given twice, there are more than `MAX_POINTS` points, or a
            value is out of range.
    """
    names = [axis.name for axis in axes]
    if repeated := _repeated(names):
        raise InputError(f"{repeated[0]}: given twice; give all its values at once")
    count = prod(len(axis.values) for axis in axes)
    if count > MAX_POINTS:
        raise InputError(f"{count} points to measure: at most {MAX_POINTS}; give fewer values")
    points = (dict(zip(names, each, strict=True)) for each in product(*(a.values for a in axes)))
    return tuple(_workload(requested, point, quantized_kv_start) for point in points)


def _workload(
    requested: Workload, point: dict[str, int | None], quantized_kv_start: int
) -> Workload:
    changes: dict[str, Any] = {_SETTINGS[name].field: value for name, value in point.items()}
    if point.get("kv-bits") is not None:
        changes["quantized_kv_start"] = quantized_kv_start
    return replace(requested, **changes)


def _read(name: str, text: str) -> int | None:
    try:
        return _SETTINGS[name].read(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _repeated(values: Sequence[Value]) -> list[Value]:
    return [each for index, each in enumerate(values) if each in values[:index]]


def _at_least_one(what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if (count := parse_count(text)) < 1:
            raise InputError(f"{printable(text)}: must be at least 1 {what}")
        return count

    return read


def _bits(text: str) -> int | None:
    bits = {_NONE: None, **{str(each): each for each in KV_BITS}}
    if text not in bits:
        raise InputError(f"{printable(text)}: KV bits in MLX are one of {', '.join(bits)}")
    return bits[text]


class _Setting(NamedTuple):
    field: str  # of a workload
    read: Callable[[str], int | None]
    example: str


_SETTINGS = {
    "prefill-step": _Setting("prefill_step", _at_least_one("token"), "prefill-step=256,512,1024"),
    "kv-bits": _Setting("kv_bits", _bits, "kv-bits=none,8,4"),
    "context": _Setting("prompt_tokens", _at_least_one("token"), "context=1k,4k"),
    "batch": _Setting("batch", _at_least_one("sequence"), "batch=1,2,4,8"),
}
