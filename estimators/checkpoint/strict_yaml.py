"""YAML of samples, held to what JSON can say: no aliases, tags, dates or repeated names.

Plain values follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema),
so that ``1e-6`` is a number and ``no`` a text, as the author of a config means them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from memfit.estimators.checkpoint.files import shown
from memfit.estimators.checkpoint.strict_json import MAX_NESTING
from memfit.estimators.errors import ConfigError

MAX_SCALAR_CHARACTERS = 4096
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def parse_document(text: bytes, path: Path) -> Any:
    """Return the one document that ``text`` holds, None when there is none.

    Raises:
        ConfigError: when it is not one YAML document in UTF-8, or has aliases, tags, keys that
            are no text, a name twice, or values and nesting beyond all use.
    """
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Document(yaml.parse(text.decode("utf-8"), Loader=loader), path).read()
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{shown(path)}: is not UTF-8 at byte {cause.start}") from None
    except yaml.YAMLError as cause:
        problem = getattr(cause, "problem", None) or "a character that YAML forbids"
        mark = getattr(cause, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{shown(path)}: is not YAML{line}: {shown(problem)}") from None


class _Document:
    """Builds values from the parser's events, so that no tag ever constructs one."""

    def __init__(self, events: Iterator[Any], path: Path) -> None:
        self._events = events
        self._path = path

    def read(self) -> Any:
        values: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if values:
                    raise self._error(event, "a second document begins; write one")
                values.append(self._value(next(self._events), depth=0))
        return values[0] if values else None

    def _value(self, event: Any, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise self._error(event, f"nested deeper than {MAX_NESTING} levels")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._error(event, "anchors and aliases are not read; write the value out")
        if event.tag is not None:
            raise self._error(event, "tags are not read; write the value plainly")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(depth)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(depth)
        return self._scalar(event)

    def _mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                raise self._error(event, "a key is no text; put it in quotes")
            if key in values:
                raise self._error(event, f"the name '{shown(key)}' stands twice")
            values[key] = self._value(next(self._events), depth + 1)
        return values

    def _sequence(self, depth: int) -> list[Any]:
        values = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, depth + 1))
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
        return ConfigError(f"{shown(self._path)}: line {event.start_mark.line + 1}: {fault}")
