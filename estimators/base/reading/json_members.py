"""A large JSON object member by member, in memory bounded by the longest of them.

A text of 100 MB parsed at once takes four bytes a character as soon as one of them is an emoji, and
all of its values on top.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.reading.strict_json import (
    RepeatedNameError,
    reject_oversized,
    unique_members,
)

# A tensor's entry has some hundred characters; the metadata of a training run up to a million.
MAX_MEMBER_CHARACTERS = 2_000_000
_FIRST_WINDOW_BYTES = 2**18
# Parsed at once, which is several times as fast: two bytes can become seventy of memory.
_SHORT_BYTES = 2**19
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(object_pairs_hook=unique_members)


def object_members(
    text: bytes, place: str, *, error: type[InputError], max_values: int, inside: str | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the JSON object that ``text`` holds.

    With ``inside`` those of the object of that name are yielded instead, where it is one; other
    members are passed over. A name that repeats is yielded again; it is the caller's to refuse.

    Raises:
        InputError: of the class ``error``, with ``place`` before what is wrong, as
            `strict_json.parse_object`, and for a member above ``MAX_MEMBER_CHARACTERS``.
    """
    reject_oversized(text, place, error=error, max_values=max_values)
    if len(text) <= _SHORT_BYTES and (whole := _whole(text, inside)) is not None:
        yield from whole.items()
        return
    window = _Window(text, place, error)
    if window.peek() != "{":
        window.value()
        raise error(f"{place} is not a JSON object")
    entered = False
    for name in _names(window):
        if name == inside and entered:
            raise error(f"{place} has the name '{printable(name)}' twice")
        if name == inside and window.peek() == "{":
            entered = True
            yield from ((inner, window.value()) for inner in _names(window))
            continue
        value = window.value()
        if inside is None:
            yield name, value
    if window.peek():
        raise window.fault("extra data")


def _whole(text: bytes, inside: str | None) -> dict[str, Any] | None:
    """The members of a short text; None leaves it to who says what is wrong with it, and where."""
    try:
        found = _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RepeatedNameError, RecursionError):
        return None
    if inside is not None and type(found) is dict:
        found = found.get(inside)
    return found if type(found) is dict else None


def _names(window: "_Window") -> Iterator[str]:
    """Yield the names of an object, each with the window before its value, to skip."""
    window.expect("{")
    if window.peek() == "}":
        window.step()
        return
    while True:
        name = window.value()
        if not isinstance(name, str):
            raise window.fault("a name belongs here")
        window.expect(":")
        yield name
        if window.expect(",}") == "}":
            return


class _Window:
    """The part of the text around a position, in characters."""

    def __init__(self, text: bytes, place: str, error: type[InputError]) -> None:
        self._text, self._place, self._error = text, place, error
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._held = ""
        self._before = 0  # characters before the held ones
        self._at = 0
        self._read = 0  # bytes decoded
        self._size = _FIRST_WINDOW_BYTES

    def peek(self) -> str:
        """Return the next character that is not a space, or an empty string at the end."""
        while True:
            self._at = _SPACE.match(self._held, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def step(self) -> None:
        """Go beyond the next character."""
        self._at += 1

    def expect(self, characters: str) -> str:
        """Go beyond one of these characters and return it."""
        found = self.peek()
        if not found or found not in characters:
            raise self.fault(f"one of {characters} belongs here")
        self.step()
        return found

    def value(self) -> Any:
        """Go beyond the next value and return it."""
        self.peek()
        while True:
            try:
                found, end = _DECODER.raw_decode(self._held, self._at)
            except json.JSONDecodeError as cause:
                if not self._grow():
                    raise self.fault(cause.msg, cause.pos) from None
                continue
            except RepeatedNameError as cause:
                raise self._error(
                    f"{self._place} has the name '{printable(cause)}' twice"
                ) from None
            except ValueError:
                raise self._error(f"{self._place} has a number of thousands of digits") from None
            except RecursionError:
                raise self._error(f"{self._place} is nested too deeply") from None
            # A number may go on in what is not decoded yet.
            if end < len(self._held) or not self._grow():
                self._at = end
                return found

    def fault(self, problem: str, at: int | None = None) -> InputError:
        """Return the error of a place that is not JSON."""
        place = self._before + (self._at if at is None else at)
        longest = f"; no member may be longer than {MAX_MEMBER_CHARACTERS} characters"
        limited = longest if self._is_longest() else ""
        return self._error(f"{self._place} is not JSON at character {place}: {problem}{limited}")

    def _is_longest(self) -> bool:
        return len(self._held) - self._at > MAX_MEMBER_CHARACTERS

    def _grow(self) -> bool:
        """Hold more of a member that does not end in what is held, if it may be longer."""
        if self._is_longest():
            return False
        self._size *= 2
        return self._more()

    def _more(self) -> bool:
        """Decode the next part of the text; False at its end."""
        if self._read >= len(self._text) and self._read:
            return False
        pending = len(self._decoder.getstate()[0])
        start, self._read = self._read, max(1, min(self._read + self._size, len(self._text)))
        try:
            part = self._decoder.decode(
                self._text[start : self._read], self._read >= len(self._text)
            )
        except UnicodeDecodeError as cause:
            byte = start - pending + cause.start
            raise self._error(f"{self._place} is not UTF-8 at byte {byte}") from None
        self._before += self._at
        self._held = self._held[self._at :] + part
        self._at = 0
        return True
