"""A strict reader of YAML mappings: each error names the file, the line and the key.

A `Reading` either raises at the first error or, with ``collect``, keeps every error until
`Reading.finish`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from memfit.estimators.base.errors import InputError, Mistake, PolicyError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.strict_yaml import Place, Placed, parse_placed

Value = TypeVar("Value")


@dataclass(slots=True)
class Reading:
    """One file while it is read, and the errors found so far."""

    path: Path
    placed: Placed
    collect: bool
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the closest mapping around it."""
        while place not in self.placed.lines and place:
            place = place[:-1]
        return self.placed.lines.get(place, 1)

    def mistake(self, place: Place, text: str, line: int | None = None) -> Mistake:
        """Return an error with its file, line and key."""
        key = ".".join(printable(step) for step in place)
        return Mistake(printable(self.path), line or self.line(place), key, text)

    def add_error(self, mistake: Mistake) -> None:
        """Keep an error, or raise it as InputError when errors are not collected."""
        if not self.collect:
            raise InputError(str(mistake))
        self.mistakes.append(mistake)

    def finish(self) -> None:
        """Raise PolicyError with every error, in the order of the file, if there is one."""
        if self.mistakes:
            raise PolicyError(sorted(set(self.mistakes), key=lambda m: (m.line, m.key, m.text)))

    def top(self, keys: tuple[str, ...]) -> "Section":
        """Return the whole document as a section."""
        for line, place in self.placed.repeated:
            self.add_error(self.mistake(place, "this name appears twice", line))
        return Section(self, (), self.placed.value, keys)


def read_sections(path: Path, *, limit: int, collect: bool = False) -> Reading:
    """Return the reading of a YAML file of at most ``limit`` bytes.

    Raises:
        CheckpointError: when the file is missing, unreadable or larger.
        ConfigError: when it is not YAML.
    """
    return Reading(path, parse_placed(read_whole(path, limit=limit), path), collect)


class Section:
    """One mapping of the file; another value is an error and reads as an empty mapping."""

    def __init__(
        self, reading: Reading, place: Place, value: Any, keys: tuple[str, ...] | None
    ) -> None:
        """Add an error for every key that is not in ``keys``; None accepts any key."""
        self.reading, self.place = reading, place
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self.add_error("expected a mapping")
        if keys is not None:
            self.only(keys)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def line(self, key: str | None = None) -> int:
        """Return the line of a key, or of the section."""
        return self.reading.line(self._at(key))

    def add_error(self, text: str, key: str | None = None) -> None:
        """Add an error about a key, or about the section."""
        self.reading.add_error(self.reading.mistake(self._at(key), text))

    def error(self, text: str, key: str | None = None) -> InputError:
        """Return the error to raise about a key, or about the section."""
        return InputError(str(self.reading.mistake(self._at(key), text)))

    def only(self, keys: tuple[str, ...]) -> None:
        """Add an error for every other key."""
        for key in self.values:
            if key not in keys:
                self.add_error(f"no such key; there is {', '.join(keys)}", key)

    def section(self, key: str, keys: tuple[str, ...] | None = None) -> "Section":
        """Return the mapping under a key; an absent one is empty."""
        return Section(self.reading, self._at(key), self.values.get(key, {}), keys)

    def items(self, key: str, keys: tuple[str, ...]) -> list["Section"]:
        """Return the mappings of the list under a key; the caller has checked that it is one."""
        place = self._at(key)
        return [
            Section(self.reading, (*place, index), value, keys)
            for index, value in enumerate(self.values[key])
        ]

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
        """Return the parsed value of a key; raise InputError when it is absent or wrong."""
        value = self.take(key, parse)
        if value is None:
            raise self.error(f"{key} is missing")
        return value

    def _at(self, key: str | None) -> Place:
        return self.place if key is None else (*self.place, key)
