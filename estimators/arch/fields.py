"""Typed reading of a config that knows the path of every key and which keys were read."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from memfit.estimators.base.errors import ConfigError

MAX_VALUE = 2**40
MAX_LAYERS = 4096
_REQUIRED: Final = object()


class Fields:
    """A section of a config; each getter checks type and range and names the key when it fails.

    A null counts as an absent key, as it does for mlx-lm's ``ModelArgs`` defaults.
    """

    def __init__(self, values: Mapping[str, Any], name: str, path: str = "") -> None:
        self._values = values
        self._name = name
        self._path = path
        self._read: set[str] = set()
        self.sections: list[Fields] = []

    def has(self, key: str) -> bool:
        """Whether the key is there and not null; looking is not reading."""
        return self._values.get(key) is not None

    def is_list(self, key: str) -> bool:
        """Whether the key holds a list; looking is not reading."""
        return isinstance(self._values.get(key), list)

    def null(self, key: str) -> bool:
        """Whether the key is there and null, which overrides a default of mlx-lm's classes."""
        return key in self._values and self._values[key] is None

    def fail(self, key: str, problem: str) -> ConfigError:
        """Return the error that names this file and key."""
        return ConfigError(f"{self._name}: {self._path}{key}: {problem}")

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_VALUE
    ) -> int:
        """Return an integer from ``least`` to ``most``; without a default the key must be there."""
        value = self._take(key, _REQUIRED if default is None else default)
        return self._checked(key, value, least, most)

    def optional_count(self, key: str, *, least: int = 1, most: int = MAX_VALUE) -> int | None:
        """Return an integer, or None when the key is absent."""
        value = self._take(key, None)
        return None if value is None else self._checked(key, value, least, most)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._take(key, _REQUIRED if default is None else default)
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, got {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._take(key, _REQUIRED if default is None else default)
        if not isinstance(value, str):
            raise self.fail(key, f"expected a text, got {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number that sizes are derived from, such as an expansion factor."""
        value = self._take(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**40:
            raise self.fail(key, f"expected a positive number, got {_shown(value)}")
        return value

    def counts(self, key: str, length: int | None = None, *, least: int = 1) -> list[int] | None:
        """Return a list of integers (one integer is for all), or None when absent."""
        value = self._take(key, None)
        if value is None:
            return None
        if length is not None and not isinstance(value, list):
            return [self._checked(key, value, least, MAX_VALUE)] * length
        items = self._list(key, value, length)
        return [
            self._checked(f"{key}[{i}]", item, least, MAX_VALUE) for i, item in enumerate(items)
        ]

    def texts(self, key: str, length: int | None = None) -> list[str] | None:
        """Return a list of strings, or None when absent."""
        value = self._take(key, None)
        if value is None:
            return None
        for i, item in enumerate(self._list(key, value, length)):
            if not isinstance(item, str):
                raise self.fail(f"{key}[{i}]", f"expected a text, got {_shown(item)}")
        return list(value)

    def items(self, key: str, length: int | None = None) -> list[Any] | None:
        """Return a list of anything, or None when absent; its items are the caller's to check."""
        value = self._take(key, None)
        return None if value is None else self._list(key, value, length)

    def section(self, key: str) -> "Fields":
        """Return a nested section; an absent one is empty."""
        section = self.untracked(key)
        self.sections.append(section)
        return section

    def untracked(self, key: str) -> "Fields":
        """Return a nested section that leaves its unread keys to the caller."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object, got {_shown(value)}")
        return Fields(value, self._name, f"{self._path}{key}.")

    def with_overrides(
        self, forced: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> "Fields":
        """Return this section with values put in, as a model class puts them in.

        What either of the two reads, both have read.
        """
        section = Fields({**(defaults or {}), **self._values, **forced}, self._name, self._path)
        section._read, section.sections = self._read, self.sections
        return section

    def require_multiple(self, key: str, value: int, unit_key: str, unit: int) -> None:
        """Raise when the value of ``key`` is no multiple of another key's, as heads must be."""
        if value % unit:
            raise self.fail(
                key, f"{value} is not a multiple of {unit_key} {unit}; heads share keys in groups"
            )

    def require_kinds(
        self, key: str, kinds: Sequence[str], known: Sequence[str], needed: Sequence[str] = ()
    ) -> None:
        """Raise when a layer's kind is not known, or no layer is of a kind the class needs."""
        for index, kind in enumerate(kinds):
            if kind not in known:
                expected = " or ".join(known)
                raise self.fail(f"{key}[{index}]", f"expected {expected}, got {kind[:40]!r}")
        for kind in needed:
            if kind not in kinds:
                raise self.fail(key, f"no layer is {kind}; the model class needs one")

    def layers(self, key: str = "num_hidden_layers", default: int | None = None) -> int:
        """Return the number of layers, which bounds the work that follows."""
        return self.count(key, default, most=MAX_LAYERS)

    def expect(self, key: str, value: Any) -> None:
        """Raise when the key is there and contradicts what mlx-lm's class always takes."""
        given = self._take(key, value)
        if given != value:
            problem = f"{_shown(given)}, but mlx-lm's model class takes {_shown(value)} always"
            raise self.fail(key, problem)

    def required_flag(self, key: str) -> bool:
        """Return a boolean that must be there; a null is false, as Python has it."""
        return not self.null(key) and self.flag(key)

    def count_or_auto(self, key: str, automatic: int) -> int:
        """Return an integer, or ``automatic`` where the value is "auto"."""
        return automatic if self._take(key, _REQUIRED) == "auto" else self.count(key)

    def chars(self, key: str) -> list[str]:
        """Return the letters of a text, or of a list of them."""
        value = self._take(key, _REQUIRED)
        return list(value) if isinstance(value, str) else self.texts(key) or []

    def ignore(self, *keys: str) -> None:
        """Mark keys that this family's model class reads without any effect on bytes."""
        self._read.update(keys)

    def unread(self) -> dict[str, Any]:
        """Return the keys, with their values, that no getter asked for."""
        return {key: value for key, value in self._values.items() if key not in self._read}

    def full_path(self, key: str) -> str:
        """Return the key as messages name it, e.g. ``text_config.head_dim``."""
        return f"{self._path}{key}"

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.fail(key, "missing; the model class needs it")
        return default

    def _checked(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"expected an integer, got {_shown(value)}")
        if not least <= value <= most:
            raise self.fail(key, f"expected {least} to {most}, got {_shown(value)}")
        return value

    def _list(self, key: str, value: Any, length: int | None) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail(key, f"expected a list, got {_shown(value)}")
        if length is not None and len(value) != length:
            raise self.fail(key, f"expected {length} entries, one per layer, got {len(value)}")
        return value


def _shown(value: Any) -> str:
    """A value as a message shows it, on one line and never long."""
    text = re.sub(r"\s+", " ", repr(value)[:80])
    return text if len(text) < 40 else text[:37] + "..."
