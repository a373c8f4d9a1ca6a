"""Strict JSON and YAML: what a file may hold, and where a value is in it.

Plain values follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema),
so that ``1e-6`` is a number and ``no`` a text, as the author of a config means them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from memfit.estimators.base.errors import ConfigError, MemfitError
from memfit.estimators.base.files import printable

MAX_NESTING = 64  # configs in use nest five or six levels
MAX_INTEGER_BITS = 128  # room to show 10^30 as what it is, and nothing that takes pages
_DIGIT_WINDOW = 512
_DIGIT_STRIDE = 4096


class RepeatedNameError(Exception):
    """An object names a key twice; readers differ in which value they keep."""


def parse_object(
    text: bytes, path: PurePath, *, what: str, error: type[MemfitError], max_values: int
) -> dict[str, Any]:
    """Return the JSON object that ``text`` holds; ``what`` names it in messages.

    Raises:
        MemfitError: of the class ``error``, when the text is not one JSON object in UTF-8, has
            more than ``max_values`` values, a repeated name, an endless number or no floor.
    """
    place = f"{printable(path)}: {what}"
    reject_oversized(text, place, error=error, max_values=max_values)
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique_members)
    except UnicodeDecodeError as cause:
        raise error(f"{place} is not UTF-8 at byte {cause.start}") from None
    except json.JSONDecodeError as cause:
        raise error(f"{place} is not JSON at character {cause.pos}: {cause.msg}") from None
    except RepeatedNameError as cause:
        raise error(f"{place} has the name '{printable(cause)}' twice") from None
    except ValueError:
        raise error(f"{place} has a number of thousands of digits") from None
    except RecursionError:
        raise error(f"{place} is nested too deeply") from None
    if not isinstance(value, dict):
        raise error(f"{place} is not a JSON object")
    if b"\\ud" in text.lower():  # half of a surrogate pair cannot be printed, nor written again
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            plain(value, printable(path), error=error)  # names the place
    return value


def reject_oversized(text: bytes, place: str, *, error: type[MemfitError], max_values: int) -> None:
    """Raise ``error`` for a text of more than ``max_values`` values, or with an endless number.

    To be called before parsing, because two bytes of text can become seventy of memory.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > max_values:
        raise error(f"{place} has more than {max_values} values")
    if _has_endless_number(text):
        raise error(f"{place} has a number of thousands of digits")


def plain(value: Any, where: str, *, error: type[MemfitError], depth: int = 0) -> Any:
    """Return a copy of ``value``, made of nothing but what JSON can say.

    An infinite number becomes ``{"__float__": "Infinity"}``, as newer transformers write it.

    Raises:
        MemfitError: of the class ``error``, naming the path of a value that is NaN, of another
            type, too large an integer, not Unicode, or nested beyond ``MAX_NESTING``.
    """
    if depth > MAX_NESTING:
        raise error(f"{where}: nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        joint = "." if depth else ": "
        return {
            _text(key, where, error): plain(
                item, f"{where}{joint}{printable(key)}", error=error, depth=depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            plain(item, f"{where}[{index}]", error=error, depth=depth + 1)
            for index, item in enumerate(value)
        ]
    return _scalar(value, where, error)


def _scalar(value: Any, where: str, error: type[MemfitError]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return _finite(value, where, error)
    if not isinstance(value, int):
        return _text(value, where, error)
    if value.bit_length() > MAX_INTEGER_BITS:
        raise error(f"{where}: an integer of {value.bit_length()} bits is too large")
    return value


def _finite(value: float, where: str, error: type[MemfitError]) -> Any:
    if math.isnan(value):
        raise error(f"{where}: expected a number, got NaN")
    if math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def _text(value: Any, where: str, error: type[MemfitError]) -> str:
    if not isinstance(value, str):
        raise error(f"{where}: {printable(value)} is a {type(value).__name__}; put it in quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{where}: '{printable(value)}' is not valid Unicode") from None
    return value


def unique_members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members; raises RepeatedNameError when a name repeats."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise RepeatedNameError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return values


def _has_endless_number(text: bytes) -> bool:
    # Before Python 3.10.7 int() takes a time that grows with the square of the digits.
    return any(
        text[start : start + _DIGIT_WINDOW].isdigit()
        for start in range(0, len(text) - _DIGIT_WINDOW, _DIGIT_STRIDE)
    )


# How a value is reached from the top: names of mappings and indices of sequences.
Place = tuple[str | int, ...]


def key_path(place: Place) -> str:
    """Return a place as messages name it.

    >>> key_path(("runs", 0, "kv_bytes"))
    'runs[0].kv_bytes'
    """
    steps = (f"[{step}]" if isinstance(step, int) else f".{printable(step)}" for step in place)
    return "".join(steps).removeprefix(".")


MAX_SCALAR_CHARACTERS = 4096
MAX_EVENTS = 60_000  # values, and beginnings and ends of those that hold others
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class PlacedDocument(NamedTuple):
    """A document with the line each value begins on, counted from 1.

    ``repeated`` holds the lines and places of names that occur twice; the first value is kept.
    """

    value: Any
    lines: dict[Place, int]
    repeated: tuple[tuple[int, Place], ...]


def parse_document(text: bytes, path: Path) -> Any:
    """Return the one document that ``text`` holds, None when there is none.

    Raises:
        ConfigError: when it is not one YAML document in UTF-8, or has aliases, tags, keys that
            are no text, a name twice, or values and nesting beyond all use.
    """
    placed = parse_placed(text, path)
    for line, place in placed.repeated:
        raise ConfigError(
            f"{printable(path)}: line {line}: the name '{printable(place[-1])}' is given twice"
        )
    return placed.value


def parse_placed(text: bytes, path: Path) -> PlacedDocument:
    """Return the one document that ``text`` holds with its lines, for mistakes named later.

    Raises:
        ConfigError: as `parse_document`, except for repeated names, which are returned.
    """
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Document(yaml.parse(text.decode("utf-8"), Loader=loader), path).read()
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{printable(path)}: is not UTF-8 at byte {cause.start}") from None
    except yaml.YAMLError as cause:
        problem = getattr(cause, "problem", None) or "a character that YAML forbids"
        mark = getattr(cause, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{printable(path)}: is not YAML{line}: {printable(problem)}") from None


class _Document:
    """Builds values from the parser's events, so that no tag ever constructs one."""

    def __init__(self, events: Iterator[Any], path: Path) -> None:
        self._events = self._bounded(events)
        self._path = path
        self._lines: dict[Place, int] = {}
        self._repeated: list[tuple[int, Place]] = []

    def read(self) -> PlacedDocument:
        values: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if values:
                    raise self._error(event, "a second document begins; write one")
                values.append(self._value(next(self._events), ()))
        return PlacedDocument(values[0] if values else None, self._lines, tuple(self._repeated))

    def _bounded(self, events: Iterator[Any]) -> Iterator[Any]:
        for number, event in enumerate(events):
            if number >= MAX_EVENTS:
                raise self._error(event, f"more than {MAX_EVENTS} values")
            yield event

    def _value(self, event: Any, place: Place) -> Any:
        if len(place) > MAX_NESTING:
            raise self._error(event, f"nested deeper than {MAX_NESTING} levels")
        self._lines.setdefault(place, event.start_mark.line + 1)
        self._reject_marks(event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(place)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(place)
        return self._scalar(event)

    def _mapping(self, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event)
            line = event.start_mark.line + 1
            if key in values:
                self._repeated.append((line, (*place, key)))
            # A value may begin below its name, and the name is what a reader looks for.
            self._lines.setdefault((*place, key), line)
            values.setdefault(key, self._value(next(self._events), (*place, key)))
        return values

    def _key(self, event: Any) -> str:
        self._reject_marks(event)
        key = self._scalar(event) if isinstance(event, yaml.ScalarEvent) else None
        if not isinstance(key, str):
            raise self._error(event, "a key is not a string; put it in quotes")
        return key

    def _reject_marks(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._error(event, "anchors and aliases are not read; write the value out")
        if event.tag is not None:
            raise self._error(event, "tags are not read; write the value plainly")

    def _sequence(self, place: Place) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, (*place, len(values))))
        return values

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if len(text) > MAX_SCALAR_CHARACTERS:
            raise self._error(event, f"a value of more than {MAX_SCALAR_CHARACTERS} characters")
        is_quoted = not event.implicit[0]
        if is_quoted:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _NUMBER.fullmatch(text) else text

    def _error(self, event: Any, fault: str) -> ConfigError:
        return ConfigError(f"{printable(self._path)}: line {event.start_mark.line + 1}: {fault}")
