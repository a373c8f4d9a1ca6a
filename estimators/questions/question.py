"""What is common to the four questions: settings by name, read from values or from texts."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.setting_names import setting

Value = TypeVar("Value")
AnyQuestion = TypeVar("AnyQuestion", bound="Question")


class Question(Struct, frozen=True, kw_only=True):
    """Settings of one kind; a setting that is None was not given.

    Each is annotated with what reads it from a value or a text. The library and the command line
    `read` them; a policy, whose mistakes have a line each, sets values that it has read.
    """

    @classmethod
    def read(cls: type[AnyQuestion], given: Mapping[str, Any]) -> AnyQuestion:
        """Return the question of settings that are given by their names.

        Raises:
            InputError: naming the setting, when a value cannot be read or is out of range.
        """
        values = {}
        for name, value in given.items():
            if value is not None:
                reader, *_ = cls.__annotations__[name].__metadata__
                values[name] = read_setting(name, reader, value)
        return cls(**values)


def read_setting(name: str, read: Callable[[Any], Value], value: Any) -> Value:
    """Return what ``read`` makes of the value of a setting.

    Raises:
        InputError: naming the setting, when the value cannot be read.
    """
    try:
        return read(value)
    except InputError as error:
        raise InputError(f"{setting(name)}: {error}") from None


def integer(value: Any) -> int:
    """Return a whole number."""
    if type(value) is not int:
        raise InputError(f"expected a whole number, got {short(value)}")
    return value


def flag(value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise InputError(f"expected True or False, got {short(value)}")
    return value


def text(value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise InputError(f"expected a string, got {short(value)}")
    return value


def path(value: Any) -> Path:
    """Return a path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"expected a path, got {short(value)}")
    return Path(value)


Integer = Annotated[int | None, integer]
Text = Annotated[str | None, text]
PathSetting = Annotated[Path | None, path]


def each(
    read: Callable[[Any], Value], separator: str | None = None
) -> Callable[[Any], tuple[Value, ...]]:
    """Return a reader of one value, of a list, or of a string with separators.

    Raises:
        InputError: for an empty list of what strings separate too: a string has at least one.
    """

    def several(value: Any) -> tuple[Value, ...]:
        if isinstance(value, str) and separator:
            value = [part.strip() for part in value.split(separator)]
        if separator and value in ([], ()):
            raise InputError(f"expected one or more, got {short(value)}")
        return tuple(map(read, value if isinstance(value, list | tuple) else [value]))

    return several
