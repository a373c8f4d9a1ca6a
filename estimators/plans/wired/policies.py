"""Policies of the wired limit: which limit a group of tickets asks for, and whom it admits.

Arithmetic of mlx-swift-lm, Libraries/MLXLMCommon/WiredMemoryPolicies.swift and
SpeculativeDecoding.swift, and of mlx-swift's own max policy. All amounts are bytes.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Literal, Protocol
from uuid import uuid4

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.records import record


class WiredPolicy(Protocol):
    """What decides for a group of tickets; equal policies are one group, so they must hash.

    ``recommended`` is the working set macOS recommends, None where there is none.
    """

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return the limit for the sizes of the group's tickets."""

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Say whether a ticket of ``size`` may start beside those of ``sizes``."""


def clamp(value: int, cap: int | None, recommended: int | None) -> int:
    """Return ``value``, at most the cap, or without one the recommended working set."""
    if cap is not None:
        return min(value, cap)
    return value if recommended is None else min(value, recommended)


@record(frozen=True, slots=True)
class SumPolicy:
    """Baseline and all tickets together, at most the cap; admits what stays within it.

    >>> SumPolicy(200).limit(100, [50, 100])
    200
    """

    cap: int | None = None
    group: str = ""

    def __post_init__(self) -> None:
        """Refuse a negative cap."""
        _check(cap=self.cap)

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return baseline and sum, clamped."""
        return clamp(baseline + sum(sizes), self.cap, recommended)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Say whether the sum with the ticket is not clamped."""
        projected = baseline + sum(sizes) + size
        return clamp(projected, self.cap, recommended) == projected


@record(frozen=True, slots=True)
class MaxPolicy:
    """The largest ticket alone; always admits.

    mlx-swift-lm takes the larger of baseline and ticket, mlx-swift adds the ticket to the
    baseline (``on_baseline``).

    >>> MaxPolicy().limit(100, [20, 150, 60]), MaxPolicy(on_baseline=True).limit(100, [20, 150])
    (150, 250)
    """

    on_baseline: bool = False
    group: str = ""

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return the limit of the largest ticket."""
        largest = max(sizes, default=0)
        return baseline + largest if self.on_baseline else max(baseline, largest)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Admit."""
        return True


@record(frozen=True, slots=True)
class FixedPolicy:
    """One limit whatever the tickets; always admits.

    >>> FixedPolicy(123).limit(100, [50])
    123
    """

    nbytes: int
    group: str = ""

    def __post_init__(self) -> None:
        """Refuse a negative limit."""
        _check(limit=self.nbytes)

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return the limit."""
        return self.nbytes

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Admit."""
        return True


@record(frozen=True, slots=True)
class BudgetPolicy:
    """Baseline, a base budget such as weights and workspace, and all tickets, at most the cap.

    Two budgets are one group only when their ``group`` is the same; by default it is unique.

    >>> BudgetPolicy(100, 300).limit(50, [75])
    225
    """

    base: int = field(compare=False)
    cap: int | None = field(default=None, compare=False)
    group: str = field(default_factory=lambda: uuid4().hex)

    def __post_init__(self) -> None:
        """Refuse negative amounts."""
        _check(base=self.base, cap=self.cap)

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return baseline, base and sum, clamped."""
        return clamp(baseline + self.base + sum(sizes), self.cap, recommended)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Say whether the sum with the ticket is not clamped."""
        projected = baseline + self.base + sum(sizes) + size
        return clamp(projected, self.cap, recommended) == projected


OverBudget = Literal["allow", "fallback", "fail"]


@record(frozen=True, slots=True)
class PairEvaluation:
    """A main and a draft model against a limit; ``limit_bytes`` None: nothing limits them."""

    estimated_bytes: int
    limit_bytes: int | None
    fits: bool
    use_draft: bool


@record(frozen=True, slots=True)
class SpeculativePolicy:
    """Whether a draft model is loaded beside a main model, and what happens when it does not fit.

    ``additional`` are bytes for caches and workspace; without a limit the recommended working
    set is it. ``allow`` drafts anyway, ``fallback`` generates without the draft model, ``fail``
    refuses.

    >>> SpeculativePolicy(1000, 100).evaluate(600, 250).estimated_bytes
    950
    """

    limit: int | None = None
    additional: int = 0
    over_budget: OverBudget = "fallback"

    def __post_init__(self) -> None:
        """Refuse negative amounts."""
        _check(limit=self.limit, additional=self.additional)

    def evaluate(self, main: int, draft: int, recommended: int | None = None) -> PairEvaluation:
        """Return whether the pair fits; exactly at the limit is within it."""
        estimated = main + draft + self.additional
        limit = recommended if self.limit is None else self.limit
        fits = limit is None or estimated <= limit
        return PairEvaluation(estimated, limit, fits, fits or self.over_budget == "allow")


def _check(**amounts: int | None) -> None:
    for name, nbytes in amounts.items():
        if nbytes is not None and nbytes < 0:
            raise InputError(f"{name} of {nbytes} bytes: must not be negative")
