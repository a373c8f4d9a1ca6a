"""YAML of samples, held to what JSON can say: no aliases, tags, dates or repeated names.

Plain values follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema),
so that ``1e-6`` is a number and ``no`` a text, as the author of a config means them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.files import printable
from memfit.estimators.base.reading.strict_json import MAX_NESTING, Place

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
