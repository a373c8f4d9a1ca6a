"""How caches get room for more tokens: capacity, what is copied, and what lives meanwhile.

Each rule is one pure function of tokens; ``last_growth`` gives the capacity of a session, and
``growth_events`` every reallocation up to it. mlx-lm's own caches with their windows are
arch/caches.py's; the rule of steps here is what they do while one token follows another.
"""

from collections.abc import Iterator

from memfit.estimators.base.records import record
from memfit.estimators.base.units import round_down, round_up
from memfit.estimators.runtimes.runtime import Growth, Runtime


@record(frozen=True, slots=True)
class GrowthRule:
    """A way to grow; all counts are tokens.

    ``step`` is what a capacity is a multiple of; ``initial`` the first capacity of a cache that
    doubles; ``most`` the capacity that is never exceeded, and a contiguous cache's from the start.
    """

    kind: Growth
    step: int
    initial: int = 0
    most: int | None = None

    def grown(self, capacity: int, tokens: int) -> int:
        """Return the capacity when ``tokens`` must have room in a cache of ``capacity``.

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
        """Whether growing makes a new buffer and copies the old one into it."""
        return self.kind in ("steps", "doubling")

    def _doubled(self, capacity: int, tokens: int) -> int:
        wanted = self.initial if not capacity else 2 * capacity
        wanted = max(wanted, tokens)
        if self.most is not None:
            wanted = min(wanted, max(self.most, tokens))
        return align_capacity(wanted, self.step)


@record(frozen=True, slots=True)
class GrowthEvent:
    """One reallocation: the token that needed it, capacities and tokens copied.

    ``alive`` are the tokens that have room while old and new live together.
    """

    tokens: int
    before: int
    after: int
    copied: int
    alive: int


def rule_of(runtime: Runtime, *, most: int | None = None) -> GrowthRule:
    """Return the rule a runtime grows by; ``most`` is its longest context if it has none set."""
    limit = most if runtime.max_context is None else runtime.max_context
    return GrowthRule(runtime.growth, runtime.kv_step, runtime.kv_initial, limit)


def align_capacity(tokens: int, alignment: int = 128) -> int:
    """Return a capacity aligned up, at least one alignment: for allocations.

    Source: Foundry, ContextConfig::align_capacity and its tests.

    >>> align_capacity(0), align_capacity(127), align_capacity(200)
    (128, 128, 256)
    """
    return max(alignment, round_up(tokens, alignment))


def align_budget(tokens: int, alignment: int = 128) -> int:
    """Return tokens aligned down: what fits a budget.

    >>> align_budget(200)
    128
    """
    return round_down(tokens, alignment)


def growth_events(
    rule: GrowthRule, tokens: int, *, capacity: int = 0, start: int = 0
) -> Iterator[GrowthEvent]:
    """Yield the reallocations while a session grows token by token from ``start`` to ``tokens``.

    A page is added to those there are: nothing is copied and nothing lives twice.
    """
    position = start
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
