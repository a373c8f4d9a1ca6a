"""Reading a policy key by key: every mistake is kept with its line, none stops the reading."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from memfit.estimators.base.errors import InputError, Mistake, PolicyError
from memfit.estimators.base.files import printable
from memfit.estimators.base.reading.strict_yaml import Place, Placed

Value = TypeVar("Value")


@dataclass(slots=True)
class Reading:
    """One policy file being read, and the mistakes found so far."""

    path: Path
    placed: Placed
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the nearest that there is above it."""
        while place not in self.placed.lines and place:
            place = place[:-1]
        return self.placed.lines.get(place, 1)

    def blame(self, place: Place, text: str) -> None:
        """Keep a mistake."""
        name = ".".join(printable(part) for part in place)
        self.mistakes.append(Mistake(printable(self.path), self.line(place), name, text))

    def finish(self) -> None:
        """Raise PolicyError with every mistake, in the order of the file, if there is one."""
        if self.mistakes:
            raise PolicyError(sorted(set(self.mistakes), key=lambda m: (m.line, m.key, m.text)))

    def top(self, keys: tuple[str, ...]) -> "Section":
        """Return the whole document as a section."""
        for line, place in self.placed.repeated:
            name = ".".join(printable(part) for part in place)
            self.mistakes.append(
                Mistake(printable(self.path), line, name, "this name stands twice")
            )
        return Section(self, (), self.placed.value, keys)


class Section:
    """One mapping of the policy; what is no mapping reads as an empty one, and is a mistake."""

    def __init__(
        self, reading: Reading, place: Place, value: Any, keys: tuple[str, ...] | None
    ) -> None:
        """Blame keys that are not among ``keys``; None takes any."""
        self.reading, self.place = reading, place
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            reading.blame(place, "expected a mapping")
        for key in self.values if keys is not None else ():
            if key not in (keys or ()):
                self.blame(f"no such key; there is {', '.join(keys or ())}", key)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def names(self) -> Iterator[str]:
        """Yield the keys there are."""
        yield from self.values

    def line(self, key: str | None = None) -> int:
        """Return the line of a key, or of the section."""
        return self.reading.line(self.place if key is None else (*self.place, key))

    def blame(self, text: str, key: str | None = None) -> None:
        """Keep a mistake about a key, or about the section."""
        self.reading.blame(self.place if key is None else (*self.place, key), text)

    def section(self, key: str, keys: tuple[str, ...] | None) -> "Section":
        """Return the mapping under a key; an absent one is empty."""
        return Section(self.reading, (*self.place, key), self.values.get(key, {}), keys)

    def take(self, key: str, parse: Callable[[Any], Value]) -> Value | None:
        """Return the parsed value of a key, None when it is absent or wrong."""
        if key not in self.values:
            return None
        try:
            return parse(self.values[key])
        except InputError as error:
            self.blame(str(error), key)
            return None
