"""Files that plans are made from, read key by key; an error names file, line and key."""

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.strict_yaml import Place, Placed, parse_placed
from memfit.estimators.base.units import parse_duration, parse_size

_NAME = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")
Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=str)


class Section:
    """One mapping of a file; reading stops at the first mistake."""

    def __init__(self, path: Path, placed: Placed, place: Place = ()) -> None:
        """Take the mapping at a place; raise InputError when there is another value."""
        self.path, self.placed, self.place = path, placed, place
        value = placed.value
        for step in place:
            value = value[step]
        if not isinstance(value, dict):
            raise self.error(None, "expected a mapping")
        self.values: dict[str, Any] = value

    def error(self, key: str | int | None, text: str) -> InputError:
        """Return the error to raise for a key, or for the whole section."""
        place = self.place if key is None else (*self.place, key)
        known = place
        while known not in self.placed.lines and known:
            known = known[:-1]
        where = f"{printable(self.path)}:{self.placed.lines.get(known, 1)}"
        return InputError(": ".join(filter(None, (where, dotted(place), text))))

    def only(self, keys: tuple[str, ...]) -> None:
        """Raise InputError when there is another key."""
        for key in self.values:
            if key not in keys:
                raise self.error(key, f"no such key; there is {', '.join(keys)}")

    def take(self, key: str, parse: Callable[[Any], Value]) -> Value | None:
        """Return the parsed value of a key, None when it is absent."""
        if key not in self.values:
            return None
        try:
            return parse(self.values[key])
        except InputError as error:
            raise self.error(key, str(error)) from None

    def need(self, key: str, parse: Callable[[Any], Value]) -> Value:
        """Return the parsed value of a key that must be there."""
        value = self.take(key, parse)
        if value is None:
            raise self.error(None, f"{key} is missing")
        return value

    def names(self) -> tuple[str, ...]:
        """Return the keys, each of them a short name that a person gave."""
        for key in self.values:
            try:
                as_name(key)
            except InputError as error:
                raise self.error(key, str(error)) from None
        return tuple(self.values)

    def below(self, *steps: str | int) -> "Section":
        """Return the mapping further down."""
        return Section(self.path, self.placed, (*self.place, *steps))


def read_section(path: Path, keys: tuple[str, ...], *, limit: int) -> Section:
    """Return the mapping of a YAML file of at most ``limit`` bytes.

    Raises:
        CheckpointError: when the file is missing, unreadable or larger.
        InputError: when it is no mapping, has another key, or a name twice.
    """
    placed = parse_placed(read_whole(path, limit=limit), path)
    for line, place in placed.repeated:
        raise InputError(f"{printable(path)}:{line}: {dotted(place)}: this name stands twice")
    section = Section(path, placed)
    section.only(keys)
    return section


def one_of(choices: tuple[Choice, ...]) -> Callable[[Any], Choice]:
    """Return what reads one of the choices."""

    def choose(value: Any) -> Choice:
        for choice in choices:
            if value == choice:
                return choice
        offered = ", ".join(choices[:8]) or "nothing: there is none yet"
        raise InputError(f"expected {offered}; got {_shown(value)}")

    return choose


def as_name(value: Any) -> str:
    """Return a short name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(
            f"expected 1 to 40 letters, digits, and . _ + - as a name, got {_shown(value)}"
        )
    return value


def as_text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise InputError(f"expected a text, got {_shown(value)}")
    return value


def as_size(value: Any) -> int:
    """Return the bytes of a size with its unit, or of 0."""
    if type(value) is int and value == 0:
        return 0
    if not isinstance(value, str) or not value.strip()[-1:].isalpha():
        raise InputError(f"expected a size with its unit such as 24GB, got {_shown(value)}")
    return parse_size(value)


def as_duration(value: Any) -> int:
    """Return the milliseconds of a duration with its unit, or of 0."""
    if type(value) is int and value == 0:
        return 0
    if not isinstance(value, str):
        raise InputError(f"expected a duration with its unit such as 1.5s, got {_shown(value)}")
    return parse_duration(value)


def as_share(value: Any) -> Fraction:
    """Return a share of 0 to 100 %, exactly."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    found = Fraction(match[1]) / 100 if match else None
    if found is None or found > 1:
        raise InputError(f"expected a share of 0% to 100%, got {_shown(value)}")
    return found


def dotted(place: Place) -> str:
    """Return a place as text, for a message."""
    return ".".join(printable(step) for step in place)


def _shown(value: Any) -> str:
    return printable(repr(value)[:60])
