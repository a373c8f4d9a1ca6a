"""Sentences with sizes: a result carries them in decimal and in binary units, a writer chooses."""

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.units import Units

Value = TypeVar("Value")


class SizedText(str):
    """A sentence with sizes in decimal units, and the same sentence in binary ones."""

    __slots__ = ("binary",)
    binary: str


def both_units(make: Callable[[Units], Value]) -> Value:
    """Return what ``make`` returns for decimal units, its sentences known in binary units too.

    >>> text = both_units(lambda units: f"1 {units.value}")
    >>> text, in_units(text, Units.GIB)
    ('1 gb', '1 gib')
    """
    joined: Value = _joined(make(Units.GB), make(Units.GIB))
    return joined


def in_units(value: Value, units: Units) -> Value:
    """Return a result, or a part of one, with its sentences in these units."""
    return value if units is Units.GB else _binary(value)


def _joined(decimal: Any, binary: Any) -> Any:
    if decimal == binary:
        return decimal
    if isinstance(decimal, str):
        text = SizedText(decimal)
        text.binary = binary
        return text
    if isinstance(decimal, Struct):
        fields = ((name, getattr(decimal, name)) for name in decimal.__struct_fields__)
        return replace(decimal, **{n: _joined(each, getattr(binary, n)) for n, each in fields})
    return tuple(_joined(*each) for each in zip(decimal, binary, strict=True))


def _binary(value: Any) -> Any:
    if isinstance(value, SizedText):
        return value.binary
    if isinstance(value, Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: _binary(each) for name, each in fields.items()}
        return replace(value, **{n: each for n, each in changed.items() if each is not fields[n]})
    if isinstance(value, tuple):
        parts = tuple(map(_binary, value))
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value
