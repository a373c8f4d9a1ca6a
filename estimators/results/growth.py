"""A plan of growing sessions as data: renderers show it and compute nothing."""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Bytes, Count, Tokens
from memfit.estimators.base.workload import MAX_TOKENS
from memfit.estimators.results.estimate import Note, RuntimeSummary
from memfit.estimators.results.result import Result

Growth = Literal["steps", "doubling", "contiguous", "paged"]
MAX_SESSIONS = 100_000
MAX_TURNS = 100_000


class Sessions(Struct, frozen=True, kw_only=True):
    """Identical sessions: a shared prefix, then turns of equal length.

    Raises:
        InputError: when a count is out of range.
    """

    sessions: Count = 1
    prefix_tokens: Tokens = 0
    turns: Count = 1
    turn_tokens: Tokens

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("sessions", self.sessions, 1, MAX_SESSIONS),
            ("turns", self.turns, 1, MAX_TURNS),
            ("prefix tokens", self.prefix_tokens, 0, MAX_TOKENS),
            ("turn tokens", self.turn_tokens, 1, MAX_TOKENS),
            ("tokens of a session", self.tokens, 1, MAX_TOKENS),
        ):
            if not least <= value <= most:
                raise InputError(f"{name} {value}: must be from {least} to {most}")

    @property
    def tokens(self) -> int:
        """Tokens of one session after its last turn."""
        return self.after(self.turns)

    def after(self, turn: int) -> int:
        """Return the tokens of a session after a turn, 1 for the first."""
        return self.prefix_tokens + turn * self.turn_tokens


class Turn(Struct, frozen=True):
    """All sessions after one turn."""

    turn: Count
    tokens: Tokens
    allocated_bytes: Bytes
    held_bytes: Bytes
    """Bytes of tokens that are still needed."""


class Crossing(Struct, frozen=True):
    """Where the caches first exceed the budget."""

    tokens: Tokens
    turn: Count
    alive_bytes: Bytes


class GrowthRow(Struct, frozen=True, kw_only=True):
    """Sessions under one growth rule; runtimes with equal figures share a row."""

    runtimes: tuple[str, ...]
    growth: Growth
    step: Count
    bytes_per_token: Bytes
    allocated_bytes: Bytes
    held_bytes: Bytes
    peak_bytes: Bytes
    """With the old and the new cache of one session alive."""
    growths: Count
    copied_bytes: Bytes
    shared_bytes: Bytes
    """Pages of the prefix that the other sessions do not allocate again."""
    budget_bytes: Bytes | None
    """Memory for all caches under these runtimes."""
    crossing: Crossing | None
    turns: tuple[Turn, ...]


class UnsupportedRuntime(Struct, frozen=True):
    """A runtime that has no cache for this model."""

    runtime: str
    reason: str


class GrowthPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-growth/1"):
    """The result of ``memfit plan growth``."""

    model: str
    sessions: Sessions
    tokens: Tokens
    budget_bytes: Bytes | None
    """Memory for all caches, where it is the same under all rules."""
    runtimes: tuple[RuntimeSummary, ...]
    """Those of all rules."""
    rules: tuple[GrowthRow, ...]
    undecided: tuple[UnsupportedRuntime, ...]
    notes: tuple[Note, ...]

    @property
    def has_budgets(self) -> bool:
        """Whether runtimes leave their caches different amounts."""
        return self.budget_bytes is None and any(
            rule.budget_bytes is not None for rule in self.rules
        )
