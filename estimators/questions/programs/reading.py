"""Reading the command line of another program as it is pasted."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import takewhile
from typing import Any, TypeVar

from msgspec import Struct

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.questions.programs.program import Given, Program, quoted
from memfit.estimators.results.program_line import ProgramLine

MAX_LINE = 20_000
"""Characters of a line; a shell's line of one program has a few hundred."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")
_BEFORE = ("$", "sudo", "nohup", "exec", "time", "uvx")
_ENDS = ("&", "&&", "|", ";", ">", ">>", "2>", "2>&1")
"""Words of a shell after which a program's own have ended."""
_PACKAGE = "memfit.estimators.questions.programs"
_MODULES = ("llama_cpp", "mlx", "vllm", "ollama")
_OFF = ("-nkvo", "-nr", "-nocb")
"""Short names of llama.cpp that turn something off."""
Value = TypeVar("Value")


class Line(Struct, frozen=True, kw_only=True):
    """A command line of another program, read."""

    shown: ProgramLine
    command: str
    """The command of memfit that answers for it."""
    settings: dict[str, Any]
    """Settings of the questions and of the command, by their names."""
    needs_images: bool = False


@cache
def programs() -> Mapping[str, Program]:
    """Return the programs by their names, and by the modules that run them."""
    found: dict[str, Program] = {}
    for module in _MODULES:
        for program in import_module(f"{_PACKAGE}.{module}").PROGRAMS:
            found.update(dict.fromkeys((program.name, *program.modules), program))
    return found


def starts_line(words: Sequence[str]) -> bool:
    """Whether words begin with a program whose lines are read."""
    return _program(_without_prefix(words)[1]) is not None


def read_line(text: str) -> Line:
    """Return the settings of a line as it is pasted.

    Raises:
        InputError: for a program or flags that are not known, a value that cannot be read, or a
            line that a shell would not read.
        UnsupportedError: for flags that change memory in a way that is not described.
    """
    if len(text) > MAX_LINE:
        raise InputError(f"a line of {len(text)} characters: at most {MAX_LINE} are read")
    text = re.sub(r"\\\r?\n", " ", text)
    try:
        words = list(takewhile(lambda word: word not in _ENDS, shlex.split(text, comments=True)))
    except ValueError as error:
        raise InputError(f"{quoted(text)}: a shell does not read it: {error}") from None
    variables, words = _without_prefix(words)
    found = _program(words)
    if found is None:
        known = ", ".join(sorted({each.name for each in programs().values()}))
        raise InputError(f"{quoted(text)}: not a line of {known}")
    program, arguments = found
    reader = _Reader(program)
    for name, value in variables:
        reader.set_variable(name, value)
    reader.read(arguments)
    reader.require_described()
    settings = program.settings(reader.given)
    shown = ProgramLine(
        program=program.name,
        line=" ".join(printable(text).split()),
        ignored=tuple(dict.fromkeys(reader.ignored)),
        notes=(*settings.notes, *reader.notes),
    )
    return Line(
        shown=shown,
        command=settings.command,
        settings=settings.values,
        needs_images=program.needs_images,
    )


def _without_prefix(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Variables that are set for the program, and the words from its name on."""
    variables, rest = [], list(words)
    while rest:
        if match := _ASSIGNMENT.fullmatch(rest[0]):
            variables.append((match[1], match[2]))
        elif rest[0] not in (*_BEFORE, "env") and rest[:2] != ["uv", "run"]:
            break
        rest = rest[2 if rest[0] == "uv" else 1 :]
    return variables, rest


def _program(words: Sequence[str]) -> tuple[Program, list[str]] | None:
    """The program that words call, and its arguments."""
    if not words:
        return None
    first = os.path.basename(words[0].replace("\\", "/")).removesuffix(".exe")
    rest = [first, *words[1:]]
    if re.fullmatch(r"python[\d.]*", first) and rest[1:2] == ["-m"]:
        rest = rest[2:]
    names = [" ".join(rest[:2]), ".".join(rest[:2]), rest[0]]
    counts = (2, 2, 1)
    for name, count in zip(names, counts, strict=True):
        if program := programs().get(name):
            return program, rest[count:]
    return None


class _Reader:
    """Reads the arguments of a program: values, and what is to be said of the other flags."""

    def __init__(self, program: Program) -> None:
        self._program, self._flags = program, program.flags
        self._taken = self._by_name(program.taken)
        self._undescribed_flags = self._by_name(program.undescribed)
        self._noted = self._by_name(program.noted)
        self.given: Given = {}
        self.ignored: list[str] = []
        self.notes: list[str] = []
        self._unknown: list[str] = []
        self._undescribed: list[str] = []

    def set_variable(self, name: str, value: str) -> None:
        flag = self._flags.get(f"${name}")
        if flag is None:
            self.ignored.append(name)
        elif flag.arity:
            self._take(f"${name}", [value])
        else:
            is_off = value.lower() in ("0", "off", "false", "disabled")  # common/arg.cpp
            names = [each for each in flag.names if _is_off(each) == is_off]
            self._take(names[0], []) if names else self.ignored.append(name)

    def read(self, words: Sequence[str]) -> None:
        rest, ends = list(words), False
        while rest:
            word = rest.pop(0)
            if ends or not word.startswith("-") or word == "-":
                self._operand(word)
            elif word == "--":
                ends = True
            else:
                self._flag(word, rest)

    def require_described(self) -> None:
        """Raise one error for all flags that are unknown, else for all that are not described."""
        name = self._program.name
        if self._unknown:
            flags = ", ".join(dict.fromkeys(self._unknown))
            raise InputError(f"{name} has no {flags} ({self._program.source})")
        if self._undescribed:
            raise UnsupportedError(f"{name}: {'; '.join(dict.fromkeys(self._undescribed))}")

    def _operand(self, word: str) -> None:
        name = self._program.operand
        if not name:
            self._unknown.append(f"argument {quoted(word)}")
        elif name not in self.given:
            self.given[name] = word
        else:
            self.given.setdefault("words", []).append(word)

    def _flag(self, word: str, rest: list[str]) -> None:
        name, sign, value = word.partition("=") if self._program.abbreviates else (word, "", "")
        found = self._named(name)
        if found is None:
            self._unknown.append(quoted(name)[1:-1])
            while rest and not rest[0].startswith("-"):
                rest.pop(0)  # its values, which would be unknown words too
            return
        name, arity = found, self._flags[found].arity
        if sign:
            self._take(name, [value])
        elif self._flags[name].names and "." in word.lstrip("-"):
            self._take(name, [rest.pop(0)] if rest else [])
        else:
            self._take(name, self._values(name, arity, rest))

    def _named(self, name: str) -> str | None:
        if self._program.has_dashes and name.startswith("--"):
            name = name.replace("_", "-").partition(".")[0]
        if name in self._flags or not self._program.abbreviates or not name.startswith("--"):
            return name if name in self._flags else None
        near = {self._flags[each].names for each in self._flags if each.startswith(name)}
        longer = [each for each in self._flags if each.startswith(name)]
        return longer[0] if len(near) == 1 else None

    def _values(self, name: str, arity: str, rest: list[str]) -> list[str]:
        def is_value() -> bool:
            free = not self._program.abbreviates and arity not in ("+", "?")
            is_flag = rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0])
            return free or not is_flag or rest[0] == "-"

        if name in self._program.bare and (not rest or rest[0].startswith("-")):
            return [self._program.bare[name]]
        values: list[str] = []
        most = {"": 0, "=": 1, "?": 1}.get(arity, len(rest))
        if arity.startswith("=") and len(arity) > 1:
            most = int(arity[1:])
        while rest and len(values) < most and is_value():
            values.append(rest.pop(0))
        if (arity.startswith("=") and len(values) < most) or (arity == "+" and not values):
            raise InputError(f"{self._program.name} {name}: a value is missing")
        return values

    def _take(self, name: str, values: list[str]) -> None:
        key, note = self._taken.get(name), self._noted.get(name)
        other = self._undescribed_flags.get(name)
        if key:
            self.given[key.lstrip("!")] = self._value(name, key, values)
        elif other and "".join(values).lower() not in other.neutral:
            self._undescribed.append(f"{name}: {other.reason}")
        elif note:
            self.notes.append(f"{name}: {note}")
        else:
            self.ignored.append(name)

    def _value(self, name: str, key: str, values: list[str]) -> Any:
        arity = self._flags[name].arity
        if not arity:
            return not key.startswith("!")
        return values if arity == "+" else "".join(values[:1])

    def _by_name(self, table: Mapping[str, Value]) -> dict[str, Value]:
        """The rows of a table by all names of their flags that turn the same thing on or off."""
        return {
            name: value
            for flag, value in table.items()
            for name in self._flags[flag].names
            if _is_off(name) == _is_off(flag)
        }


def _is_off(name: str) -> bool:
    return name.startswith(("--no-", "-no-")) or name in _OFF
