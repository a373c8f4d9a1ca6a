"""Policies of the wired limit: the limit a group of tickets requests, and which it admits.

The arithmetic is that of mlx-swift-lm, Libraries/MLXLMCommon/WiredMemoryPolicies.swift and
SpeculativeDecoding.swift, and of mlx-swift's own max policy. All amounts are bytes.
"""

from collections.abc import Sequence
from typing import Literal, Protocol
from uuid import uuid4

from msgspec import Struct, field

from memfit.estimators.base.errors import InputError


class WiredPolicy(Protocol):
    """The rule of a group of tickets; equal policies are one group, so a policy must hash.

    ``recommended`` is the working set that macOS recommends, None when there is none.
    """

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return the limit for the sizes of the group's tickets."""

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Return whether a ticket of ``size`` may start next to tickets of ``sizes``."""


def clamp(value: int, cap: int | None, recommended: int | None) -> int:
    """Return ``value``, at most the cap, or the recommended working set without a cap."""
    most = recommended if cap is None else cap
    return value if most is None else min(value, most)


class SumPolicy(Struct, frozen=True):
    """Baseline plus all tickets, at most the cap; admits what stays within it.

    >>> SumPolicy(200).limit(100, [50, 100])
    200
    """

    cap: int | None = None
    group: str = ""

    def __post_init__(self) -> None:
        """Reject a negative cap."""
        _check(cap=self.cap)

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return the clamped sum."""
        return clamp(baseline + sum(sizes), self.cap, recommended)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Return whether the sum with the ticket is not clamped."""
        projected = baseline + sum(sizes) + size
        return clamp(projected, self.cap, recommended) == projected


class _AlwaysAdmits(Struct, frozen=True):
    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Return True."""
        return True


class MaxPolicy(_AlwaysAdmits, frozen=True):
    """The largest ticket alone; always admits.

    >>> MaxPolicy().limit(100, [20, 150, 60]), MaxPolicy(on_baseline=True).limit(100, [20, 150])
    (150, 250)
    """

    on_baseline: bool = False
    """Add the ticket to the baseline, as mlx-swift; otherwise the larger one, as mlx-swift-lm."""
    group: str = ""

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        largest = max(sizes, default=0)
        return baseline + largest if self.on_baseline else max(baseline, largest)


class FixedPolicy(_AlwaysAdmits, frozen=True):
    """One limit for any tickets; always admits.

    >>> FixedPolicy(123).limit(100, [50])
    123
    """

    nbytes: int
    group: str = ""

    def __post_init__(self) -> None:
        """Reject a negative limit."""
        _check(limit=self.nbytes)

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        return self.nbytes


class BudgetPolicy(Struct, frozen=True, eq=False):
    """Baseline plus a base budget (weights and workspace) plus all tickets, at most the cap.

    Two budgets are one group only when their ``group`` is the same; by default it is unique.

    >>> BudgetPolicy(100, 300).limit(50, [75])
    225
    """

    base: int
    cap: int | None = None
    group: str = field(default_factory=lambda: uuid4().hex)

    def __post_init__(self) -> None:
        """Reject negative amounts."""
        _check(base=self.base, cap=self.cap)

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a budget of the same group."""
        return isinstance(other, BudgetPolicy) and self.group == other.group

    def __hash__(self) -> int:
        return hash(self.group)

    def limit(self, baseline: int, sizes: Sequence[int], recommended: int | None = None) -> int:
        """Return the clamped sum."""
        return SumPolicy(self.cap).limit(baseline + self.base, sizes, recommended)

    def admits(
        self, baseline: int, sizes: Sequence[int], size: int, recommended: int | None = None
    ) -> bool:
        """Return whether the sum with the ticket is not clamped."""
        return SumPolicy(self.cap).admits(baseline + self.base, sizes, size, recommended)


OverBudget = Literal["allow", "fallback", "fail"]


class PairEvaluation(Struct, frozen=True):
    """A main and a draft model compared with a limit."""

    estimated_bytes: int
    limit_bytes: int | None
    """None when there is no limit."""
    fits: bool
    use_draft: bool


class SpeculativePolicy(Struct, frozen=True):
    """Whether a draft model is loaded next to a main model.

    >>> SpeculativePolicy(1000, 100).evaluate(600, 250).estimated_bytes
    950
    """

    limit: int | None = None
    """By default the recommended working set."""
    additional: int = 0
    """Bytes for caches and workspace."""
    over_budget: OverBudget = "fallback"
    """``allow`` loads the draft model anyway, ``fallback`` generates without it, ``fail`` refuses
    the request."""

    def __post_init__(self) -> None:
        """Reject negative amounts."""
        _check(limit=self.limit, additional=self.additional)

    def evaluate(self, main: int, draft: int, recommended: int | None = None) -> PairEvaluation:
        """Return whether the pair fits; a sum equal to the limit fits."""
        estimated = main + draft + self.additional
        limit = recommended if self.limit is None else self.limit
        fits = limit is None or estimated <= limit
        return PairEvaluation(estimated, limit, fits, fits or self.over_budget == "allow")


def _check(**amounts: int | None) -> None:
    for name, nbytes in amounts.items():
        if nbytes is not None and nbytes < 0:
            raise InputError(f"{name} of {nbytes} bytes: must not be negative")
