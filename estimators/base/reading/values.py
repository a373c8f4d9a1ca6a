"""Values of untrusted mappings: each function returns a value or raises InputError."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.units import parse_duration, parse_memory, parse_size

MAX_FIGURE = 2**63 - 1
_NAME = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")
Choice = TypeVar("Choice", bound=str)
Value = TypeVar("Value")


def one_of(choices: tuple[Choice, ...]) -> Callable[[Any], Choice]:
    """Return a function that accepts only these choices."""

    def choose(value: Any) -> Choice:
        for choice in choices:
            if value == choice:
                return choice
        offered = ", ".join(choices[:8]) or "nothing: none is defined yet"
        raise InputError(f"expected {offered}; got {short(value)}")

    return choose


def number_or_text(
    read_text: Callable[[str], Value], of_number: Callable[[int], Any] = int
) -> Callable[[Any], Value]:
    """Return a reader of whole numbers and strings; without ``of_number`` a number is the value."""

    def read(value: Any) -> Value:
        if isinstance(value, str):
            return read_text(value)
        if type(value) is not int or not 0 <= value <= MAX_FIGURE:
            raise InputError(
                f"expected a whole number from 0 to {MAX_FIGURE}, or a string, got {short(value)}"
            )
        number: Value = of_number(value)
        return number

    return read


def memory_value(value: Any) -> int:
    """Return the bytes of a memory; a number of at most five digits is of gigabytes.

    >>> memory_value(32), memory_value("32G"), memory_value(2**35)
    (32000000000, 32000000000, 34359738368)
    """
    return number_or_text(parse_memory, lambda size: size * 10**9 if size < 10**5 else size)(value)


def as_name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(
            f"expected 1 to 40 letters, digits, and . _ + - as a name, got {short(value)}"
        )
    return value


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"expected a string, got {short(value)}")
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Return a mapping of anything."""
    if not isinstance(value, dict):
        raise InputError(f"expected an object, got {short(value)}")
    return value


def as_size(value: Any) -> int:
    """Return the bytes of a size with its unit, or of 0."""
    if type(value) is int and value == 0:
        return 0
    if not isinstance(value, str) or not value.strip()[-1:].isalpha():
        raise InputError(f"expected a size with its unit such as 24GB, got {short(value)}")
    return parse_size(value)


def as_duration(value: Any) -> int:
    """Return the milliseconds of a duration with its unit, or of 0."""
    if type(value) is int and value == 0:
        return 0
    if not isinstance(value, str):
        raise InputError(f"expected a duration with its unit such as 1.5s, got {short(value)}")
    return parse_duration(value)


def as_share(value: Any) -> Fraction:
    """Return a share from 0 to 100 %, exactly."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    found = Fraction(match[1]) / 100 if match else None
    if found is None or found > 1:
        raise InputError(f"expected a share of 0% to 100%, got {short(value)}")
    return found
