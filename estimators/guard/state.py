"""What a guard is asked: a request, and what the server holds."""

from typing import Any, get_args

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.guard.call_tables import LONGEST_STEP


def require_counts(**numbers: Any) -> None:
    """Check that tokens, bytes and the like are whole and not negative.

    A comparison with NaN is never true, so that one would be admitted everywhere.

    Raises:
        InputError: naming the first that is not.
    """
    for name, number in numbers.items():
        _require_count(name, number)


def _require_count(name: str, number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError(f"{name} {number!r}: expected a whole number")
    if number < 0:
        raise InputError(f"{name} {number} is negative")


class _Checked(Struct, frozen=True):
    def __post_init__(self) -> None:
        """Reject what is not of its type, and negative numbers."""
        own = type(self).__name__.lower()
        for name, kind in type(self).__annotations__.items():
            value = getattr(self, name)
            if kind is int:
                _require_count(f"{own}: {name}", value)
            elif parts := get_args(kind):
                _require_all(value, parts[0], f"{own}: {name}")


def _require_all(values: Any, kind: type, name: str) -> None:
    if not isinstance(values, tuple) or not all(isinstance(each, kind) for each in values):
        raise InputError(f"{name}: expected a tuple of {kind.__name__}")


class Request(_Checked, frozen=True):
    """A prompt of ``new`` tokens after ``cached`` ones of a stored cache, and a longest reply."""

    new: int
    max_tokens: int
    cached: int = 0

    def __post_init__(self) -> None:
        """Reject numbers below those of a request."""
        _Checked.__post_init__(self)
        if not self.new or not self.max_tokens:
            raise InputError("request: it has at least one new token, and one of a reply")


class Row(_Checked, frozen=True):
    """An admitted request, by what is in its caches and what is to come."""

    tokens: int
    """In its caches now, cached ones included."""
    prompt: int
    """Tokens of the prompt that are not prefilled; 0 once it decodes."""
    reply: int
    """Tokens of the reply to come, at most."""
    id: Any = None


class Entry(_Checked, frozen=True):
    """A stored cache, evaluated."""

    id: Any
    nbytes: int
    used: int
    """When it was used last: the smallest is evicted first."""
    is_pinned: bool = False
    """An admitted request begins with it and was not called yet: evicting it frees nothing."""


class State(_Checked, frozen=True, kw_only=True):
    """What a server holds now."""

    decoding: tuple[Row, ...] = ()
    prefilling: tuple[Row, ...] = ()
    """In the batch of prompts, and admitted ones that are not in it yet."""
    entries: tuple[Entry, ...] = ()
    step: int = 2048
    """Tokens of a prefill chunk: what `Admit` said last, or the server's own while none runs."""
    other_bytes: int = 0
    """Of anything else: drafts, images, other models."""
    decode_bytes: int = 0
    """That the buffers of the decoding batch hold now, with rows that ended in the last call."""
    prompt_bytes: int = 0
    """The same of the batch of prompts."""

    def __post_init__(self) -> None:
        """Reject steps out of range, and rows in the wrong batch."""
        _Checked.__post_init__(self)
        if not 1 <= self.step <= LONGEST_STEP:
            raise InputError(f"state: step {self.step}: give one from 1 to {LONGEST_STEP}")
        for row in self.decoding:
            if row.prompt:
                raise InputError(
                    f"state: decoding: row {row.id!r} has {row.prompt} tokens of its prompt to"
                    " come: it belongs to prefilling"
                )
