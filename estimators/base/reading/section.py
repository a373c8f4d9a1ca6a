"""Strict reading of untrusted mappings: each error names the file, the line in YAML, and the key.

A `Reading` either raises at the first error or, with ``collect``, keeps every error until
`Reading.finish`. `to_record` makes a record of a mapping whose fields have its types and ranges.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, ClassVar, Final, TypeVar

from msgspec import Struct, ValidationError, convert

from memfit.estimators.base.errors import InputError, MemfitError, Mistake, PolicyError
from memfit.estimators.base.files import printable, read_whole, short
from memfit.estimators.base.reading.strict_json import Place, key_path, parse_object
from memfit.estimators.base.units import parse_duration, parse_memory, parse_size

MAX_VALUE = 2**40
REQUIRED: Final = object()
Value = TypeVar("Value")
Record = TypeVar("Record", bound=Struct)
# msgspec's messages: "Expected `int` >= 0 - at `$.runs[0].kv_bytes`".
_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\].*")
_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}
_TYPE = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_KEY = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


class Reading:
    """One file while it is read, and the errors found so far."""

    def __init__(
        self,
        name: str,
        error: type[MemfitError] = InputError,
        *,
        lines: Mapping[Place, int] | None = None,
        collect: bool = False,
    ) -> None:
        """Take how messages name the file, the class of errors, and the line of each value.

        ``lines`` is None where they are not known, as in JSON.
        """
        self.name, self.error, self.lines, self.collect = name, error, lines, collect
        self.mistakes: list[Mistake] = []

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the closest value around it; 0 when not known."""
        if self.lines is None:
            return 0
        while place not in self.lines and place:
            place = place[:-1]
        return self.lines.get(place, 1)

    def fail(self, place: Place, text: str) -> MemfitError:
        """Return the error to raise about a place."""
        return self.error(str(self._mistake(place, text)))

    def add_error(self, place: Place, text: str, line: int | None = None) -> None:
        """Keep an error, or raise it when errors are not collected."""
        mistake = self._mistake(place, text, line)
        if not self.collect:
            raise self.error(str(mistake))
        self.mistakes.append(mistake)

    def finish(self) -> None:
        """Raise PolicyError with every error, in the order of the file, if there is one."""
        if self.mistakes:
            raise PolicyError(sorted(set(self.mistakes), key=lambda m: (m.line, m.key, m.text)))

    def section(
        self, value: Any, place: Place = (), keys: tuple[str, ...] | None = None
    ) -> "Section":
        """Return a mapping; another value is an error and reads as an empty one.

        Every key that is not in ``keys`` is an error; None accepts any key.
        """
        if not isinstance(value, dict):
            self.add_error(place, "expected a mapping")
            value = {}
        section = Section(value, self, place)
        if keys is not None:
            section.only(keys)
        return section

    def _mistake(self, place: Place, text: str, line: int | None = None) -> Mistake:
        return Mistake(self.name, line or self.line(place), key_path(place), text)


def read_yaml(path: Path, keys: tuple[str, ...], *, limit: int, collect: bool = False) -> "Section":
    """Return the mapping of a YAML file of at most ``limit`` bytes.

    Raises:
        CheckpointError: when the file is missing, unreadable or larger.
        ConfigError: when it is not YAML.
        InputError: at the first error, unless errors are collected.
    """
    from memfit.estimators.base.reading.strict_yaml import parse_placed  # slow to import

    placed = parse_placed(read_whole(path, limit=limit), path)
    reading = Reading(printable(path), lines=placed.lines, collect=collect)
    for line, place in placed.repeated:
        reading.add_error(place, "this name appears twice", line)
    return reading.section(placed.value, (), keys)


def json_section(
    content: bytes,
    path: PurePath,
    *,
    what: str,
    max_values: int,
    error: type[MemfitError] = InputError,
) -> "Section":
    """Return the JSON object of a file's content; ``what`` names it in messages.

    Raises:
        MemfitError: of the class ``error``, as `parse_object`.
    """
    values = parse_object(content, path, what=what, error=error, max_values=max_values)
    return Section(values, Reading(printable(path), error))


class Section:
    """One mapping of a file; each getter checks type and range.

    The typed getters raise at the first error, and a null counts as an absent key for them, as it
    does for the defaults of mlx-lm's ``ModelArgs``. `take` accepts a null and can collect errors.
    """

    missing: ClassVar[str] = "missing"

    def __init__(self, values: Mapping[str, Any], reading: Reading, place: Place = ()) -> None:
        self.values, self.reading, self.place = values, reading, place

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def line(self, key: str | None = None) -> int:
        """Return the line of a key, or of the section."""
        return self.reading.line(self._at(key))

    def add_error(self, text: str, key: str | None = None) -> None:
        """Add an error about a key, or about the section."""
        self.reading.add_error(self._at(key), text)

    def fail(self, key: str | None, problem: str) -> MemfitError:
        """Return the error to raise about a key, or about the section."""
        return self.reading.fail(self._at(key), problem)

    def only(self, keys: tuple[str, ...]) -> None:
        """Add an error for every other key."""
        for key in self.values:
            if key not in keys:
                self.add_error(f"no such key; there is {', '.join(keys)}", key)

    def take(self, key: str, parse: Callable[[Any], Value]) -> Value | None:
        """Return the parsed value of a key, None when it is absent or wrong."""
        if key not in self.values:
            return None
        try:
            return parse(self.values[key])
        except InputError as error:
            self.add_error(str(error), key)
            return None

    def need(self, key: str, parse: Callable[[Any], Value]) -> Value:
        """Return the parsed value of a key; raise an error when it is absent or wrong."""
        value = self.take(key, parse)
        if value is None:
            raise self.fail(None, f"{key} is missing")
        return value

    def mapping(self, key: str, keys: tuple[str, ...] | None = None) -> "Section":
        """Return the mapping under a key; an absent one is empty."""
        return self.reading.section(self.values.get(key, {}), self._at(key), keys)

    def mappings(self, key: str, keys: tuple[str, ...] | None = None) -> Iterator["Section"]:
        """Yield the mappings of the list under a key.

        Raises:
            MemfitError: when it is not a list.
        """
        for index, value in enumerate(self._list(key, self._take(key, REQUIRED))):
            yield self.reading.section(value, (*self._at(key), index), keys)

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_VALUE
    ) -> int:
        """Return an integer from ``least`` to ``most``; without a default the key must be there."""
        value = self._take(key, REQUIRED if default is None else default)
        return self._checked(key, value, least, most)

    def optional_count(self, key: str, *, least: int = 1, most: int = MAX_VALUE) -> int | None:
        """Return an integer, or None when the key is absent."""
        value = self._take(key, None)
        return None if value is None else self._checked(key, value, least, most)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key, REQUIRED if default is None else default)
        if not isinstance(value, str):
            raise self.fail(key, f"expected a string, got {short(value)}")
        return value

    def full_path(self, key: str) -> str:
        """Return the key as messages name it, e.g. ``text_config.head_dim``."""
        return key_path(self._at(key))

    def _at(self, key: str | None) -> Place:
        return self.place if key is None else (*self.place, key)

    def _take(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return self._absent(key, default) if value is None else value

    def _absent(self, key: str, default: Any) -> Any:
        if default is REQUIRED:
            raise self.fail(key, self.missing)
        return default

    def _checked(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"expected an integer, got {short(value)}")
        if not least <= value <= most:
            raise self.fail(key, f"expected {least} to {most}, got {short(value)}")
        return value

    def _list(self, key: str, value: Any, length: int | None = None) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail(key, f"expected a list, got {short(value)}")
        if length is not None and len(value) != length:
            raise self.fail(key, f"expected {length} entries, one per layer, got {len(value)}")
        return value


def to_record(kind: type[Record], value: Any, reading: Reading, place: Place = ()) -> Record:
    """Convert a mapping to a record; a type with a tag needs it in the mapping.

    Raises:
        MemfitError: of the reading's class, for the first field that is unknown, missing or wrong.
    """
    tag_field, tag = kind.__struct_config__.tag_field, kind.__struct_config__.tag
    if tag_field is not None and reading.section(value, place).values.get(tag_field) != tag:
        raise reading.fail((*place, tag_field), f"expected {tag}")
    try:
        return convert(value, kind)
    except ValidationError as error:
        steps, text = _located(str(error), value)
        raise reading.fail((*place, *steps), text) from None
    except InputError as error:  # of the record's own check
        raise reading.fail(place, str(error)) from None


def _located(message: str, value: Any) -> tuple[Place, str]:
    """Return where a message of msgspec is about, and what it says with the value that is there."""
    text, path = _MESSAGE.fullmatch(message).groups()  # type: ignore[union-attr]
    place: Place = ()
    for step in _STEP.finditer(path or ""):
        if step.lastindex is None:  # into a mapping: msgspec does not name the key
            break
        place += (step[1] or int(step[2]),)
        value = value[place[-1]]
    if key := _KEY.fullmatch(text):
        return (*place, key[2]), "missing" if key[1].startswith("missing") else "unknown key"
    if text.startswith("Invalid"):
        return place, f"{short(value)} is not one of the values it can have"
    text, _, _ = text.partition(", got `")
    named = _TYPE.sub(lambda name: _NAMES[name[0]], text.replace("`", ""))
    return place, f"{named[0].lower()}{named[1:]}, got {short(value)}"


MAX_FIGURE = 2**63 - 1
_NAME = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")
Choice = TypeVar("Choice", bound=str | int)


def one_of(choices: tuple[Choice, ...]) -> Callable[[Any], Choice]:
    """Return a function that accepts only these choices."""

    def choose(value: Any) -> Choice:
        for choice in choices:
            if value == choice:
                return choice
        offered = (
            ", ".join(
                str.__str__(each) if isinstance(each, str) else str(each) for each in choices[:8]
            )
            or "nothing: none is defined yet"
        )
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
