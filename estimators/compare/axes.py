"""The axes along which a comparison varies its question."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.dtypes import FLOAT_MODES, Quantization, converted, parse_format
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_count, parse_memory
from memfit.estimators.machine.device import Device, OsRegime
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.results.comparison import AXES, SettingValue
from memfit.estimators.sizing.resolved import TargetQuestion

# Nobody reads a larger matrix: it is a mistake, and would take minutes.
MAX_COMBINATIONS = 10_000
_COUNTS = {
    "context": "prompt_tokens",
    "max-tokens": "max_tokens",
    "batch": "batch",
    "prefill-step": "prefill_step",
    "kv-bits": "kv_bits",
}


class AxisValue(Struct, frozen=True):
    """One value of an axis, and the field of the workload or the question that it sets."""

    value: SettingValue
    field: str
    change: int | Device | Quantization | None


class MatrixAxis(Struct, frozen=True):
    """A setting that is varied, with its values as they were given."""

    name: str
    settings: tuple[AxisValue, ...]


def parse_axis(
    text: str, *, find_device: Callable[[str], Device], os_regime: OsRegime
) -> MatrixAxis:
    """Return the axis of a text such as ``context=4k,32k`` or ``kv-bits=none,8``.

    Raises:
        InputError: when there is no such axis, or one of its values cannot be read or is
            given twice.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or name not in AXES:
        what = f"the axis {name} has no values" if name in AXES else f"unknown axis {name[:40]!r}"
        raise InputError(f"{what}; write context=4k,32k with one of {', '.join(AXES)}")
    settings: list[AxisValue] = []
    for value in map(str.strip, values.split(",")):
        setting = _setting(name, value, find_device, os_regime)
        if any(setting.value == other.value for other in settings):
            raise InputError(f"{name}: {value!r} is given twice")
        settings.append(setting)
    return MatrixAxis(name, tuple(settings))


def check_axes(axes: Sequence[MatrixAxis], models: int) -> None:
    """Check that the axes can be combined.

    Raises:
        InputError: when one is given twice, two name a machine, or they make too many cells.
    """
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"the axis {name} is given twice: join its values with commas")
    if "device" in names and "memory" in names:
        raise InputError("the axes device and memory exclude each other: both name a machine")
    cells = models * math.prod(len(axis.settings) for axis in axes)
    if cells > MAX_COMBINATIONS:
        raise InputError(f"a matrix of {cells} cells: {MAX_COMBINATIONS} are the most")


def combinations(
    base: TargetQuestion, axes: Sequence[MatrixAxis]
) -> Iterator[tuple[dict[str, SettingValue], TargetQuestion]]:
    """Yield every combination of the axes, the last changing fastest; the base without axes.

    Raises:
        InputError: when a combination is out of range.
    """
    names = [axis.name for axis in axes]
    for settings in product(*(axis.settings for axis in axes)):
        # All at once: a combination may be valid where half of it is not.
        changes: dict[str, Any] = {setting.field: setting.change for setting in settings}
        counts = {name: changes.pop(name) or 0 for name in _COUNTS.values() if name in changes}
        question = replace(base, workload=base.workload.varied(counts), **changes)
        yield {n: s.value for n, s in zip(names, settings, strict=True)}, question


def _setting(
    name: str, text: str, find_device: Callable[[str], Device], os_regime: OsRegime
) -> AxisValue:
    if name == "device":
        return AxisValue(text, "device", find_device(text))
    if name == "memory":
        return AxisValue(text, "device", memory_device(parse_memory(text), os_regime=os_regime))
    if name == "quantize":
        return _conversion(text)
    nothing = name == "kv-bits" and text.lower() == "none"
    value = None if nothing else parse_count(text)
    return AxisValue(value, _COUNTS[name], value)


def _conversion(text: str) -> AxisValue:
    """A conversion by bits or mode, with the default group size of mlx_lm.convert."""
    wanted = text.lower()
    if wanted == "none":
        return AxisValue(None, "quantize", None)
    bits, mode = parse_format(text)
    value = wanted if mode in FLOAT_MODES else bits
    return AxisValue(value, "quantize", converted(bits, mode=mode))
