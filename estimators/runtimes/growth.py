"""How caches grow: their capacity, the tokens copied, and the memory during the copy.

Each rule is a pure function of tokens; ``last_growth`` has the capacity of a session's cache, and
``growth_events`` yields every reallocation up to there. mlx-lm's caches and their windows are in
arch/specs.py; the rule of steps here is their growth during decoding.
"""

from collections.abc import Iterator

from msgspec import Struct

from memfit.estimators.base.units import round_up
from memfit.estimators.results.growth import Growth
from memfit.estimators.runtimes.runtime import Runtime


class GrowthRule(Struct, frozen=True):
    """A way to grow; all counts are tokens."""

    kind: Growth
    step: int
    """A capacity is a multiple of this."""
    initial: int = 0
    """First capacity of a cache that doubles."""
    most: int | None = None
    """Largest capacity: a contiguous cache has it from the start, a doubling one never grows
    beyond it."""

    def grown(self, capacity: int, tokens: int) -> int:
        """Return the capacity after a cache of ``capacity`` grows to hold ``tokens``.

        >>> GrowthRule("doubling", 128, 2048).grown(2048, 2049)
        4096
        >>> GrowthRule("steps", 256).grown(2048, 2049)
        2304
        """
        if tokens <= capacity:
            return capacity
        if self.kind == "contiguous":
            return round_up(max(tokens, self.most or 0), self.step)
        if self.kind == "doubling":
            return self._doubled(capacity, tokens)
        return round_up(tokens, self.step)

    @property
    def copies(self) -> bool:
        """Whether growth allocates a new buffer and copies the old one into it."""
        return self.kind in ("steps", "doubling")

    def _doubled(self, capacity: int, tokens: int) -> int:
        wanted = self.initial if not capacity else 2 * capacity
        wanted = max(wanted, tokens)
        return align_capacity(min(wanted, self.most or wanted), self.step)

    def reached(self, tokens: int) -> int:
        """Return how many of ``tokens`` a session's cache grows for."""
        return min(tokens, self.most or tokens) if self.kind == "doubling" else tokens


class GrowthEvent(Struct, frozen=True):
    """One reallocation; all counts are tokens."""

    tokens: int
    """The token that caused it."""
    before: int
    after: int
    copied: int
    alive: int
    """Capacity of the old and the new buffer together, during the copy."""


def rule_of(runtime: Runtime, *, most: int | None = None) -> GrowthRule:
    """Return the growth rule of a runtime, up to ``most`` tokens or its own lower limit."""
    limit = min(filter(None, (most, runtime.max_context)), default=None)
    return GrowthRule(runtime.growth, runtime.kv_step, runtime.kv_initial, limit)


def align_capacity(tokens: int, alignment: int = 128) -> int:
    """Return a capacity rounded up to an allocation, at least one alignment.

    Source: Foundry, ContextConfig::align_capacity and its tests.

    >>> align_capacity(0), align_capacity(127), align_capacity(200)
    (128, 128, 256)
    """
    return max(alignment, round_up(tokens, alignment))


def growth_events(rule: GrowthRule, tokens: int) -> Iterator[GrowthEvent]:
    """Yield the reallocations while a session grows token by token to ``tokens``.

    A paged cache adds a page: nothing is copied.
    """
    position = capacity = 0
    tokens = rule.reached(tokens)
    while max(position, capacity) < tokens:
        position = max(position, capacity) + 1
        after = rule.grown(capacity, position)
        copied = position - 1 if rule.copies and capacity else 0
        alive = after + (capacity if copied else 0)
        yield GrowthEvent(position, capacity, after, copied, alive)
        capacity = after


def last_growth(rule: GrowthRule, tokens: int) -> GrowthEvent:
    """Return the last reallocation on the way to ``tokens``, without every one before it."""
    if rule.kind == "doubling":
        *_, last = growth_events(rule, tokens)
        return last
    after = rule.grown(0, tokens)
    if rule.kind == "contiguous" or after <= rule.step:
        return GrowthEvent(1, 0, after, 0, after)
    before = after - rule.step
    copied = before if rule.copies else 0
    return GrowthEvent(before + 1, before, after, copied, after + copied)
