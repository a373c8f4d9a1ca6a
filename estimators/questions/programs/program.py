"""A program whose command lines are read: its flags, and the settings that they make.

`NAME.txt` beside this file has a row for each option of the program's own parser: its names, with
``$`` before a variable of the environment, and ``=`` for a value, ``+`` for several, ``?`` for an
optional one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable

Given = dict[str, Any]
"""The values of a program's flags, by names of their own; those of switches are True or False."""


class Settings(NamedTuple):
    """What a program's function makes of its flags."""

    values: dict[str, Any]
    notes: Sequence[str] = ()
    command: str = "estimate"


class Undescribed(NamedTuple):
    """A flag that changes memory in a way that is not described."""

    reason: str
    neutral: tuple[str, ...] = ()
    """Values with which it changes nothing."""


class Program(Struct, frozen=True, kw_only=True):
    """A program whose lines are read."""

    name: str
    """As it is called; several words for a subcommand."""
    source: str
    """What its table was read from."""
    taken: Mapping[str, str]
    """One name of each flag that changes memory to the name of its value; ``!`` turns it off."""
    settings: Callable[[Given], Settings]
    undescribed: Mapping[str, Undescribed] = {}
    noted: Mapping[str, str] = {}
    """Flags with which less is taken than the figures say, or more elsewhere: what to say."""
    needs_images: bool = False
    """Whether its answer depends on images that its line does not have."""
    operand: str = ""
    """The name of the value of a word that is no flag; empty: there is none."""
    has_dashes: bool = False
    """Whether ``_`` in a flag is read as ``-``."""
    abbreviates: bool = True
    """Whether a flag may be cut short, and have its value after ``=``, as in argparse."""
    table: str = ""
    """The name of its table, where it is not the program's."""
    modules: Sequence[str] = ()
    """Names of Python modules that run it."""
    bare: Mapping[str, str] = {}
    """Values of flags that people write without one, as older versions took them."""

    @property
    def flags(self) -> "Mapping[str, Flag]":
        """Its flags by all their names."""
        return _table(self.table or self.name)


class Flag(NamedTuple):
    names: tuple[str, ...]
    arity: str


@cache
def _table(name: str) -> Mapping[str, Flag]:
    flags = {}
    for row in (Path(__file__).parent / f"{name}.txt").read_text("utf-8").splitlines():
        words = row.split()
        names = tuple(word for word in words if word.startswith(("-", "$")))
        flag = Flag(names, "" if len(names) == len(words) else words[-1])
        flags.update(dict.fromkeys(names, flag))
    return flags


def count_of(given: Given, name: str, flag: str, *, least: int = 0) -> int | None:
    """Return a whole number among the values of flags, None where it was not given.

    Raises:
        InputError: when it is no whole number, or below ``least``.
    """
    if name not in given:
        return None
    text = str(given[name])
    if not re.fullmatch(r"-?\d{1,15}", text) or int(text) < least:
        raise InputError(f"{flag} {quoted(text)}: expected a whole number of at least {least}")
    return int(text)


def present(given: Given, *names: str) -> dict[str, Any]:
    """Return the values that were given, for settings of the same names."""
    return {name: given[name] for name in names if name in given}


def quoted(text: str) -> str:
    """Return the beginning of a text for a message."""
    return repr(printable(text[:60]))
