"""The tokens a request may generate in a context window, and whether a server admits it.

All counts are tokens and saturate: no result is negative or above the capacity. Source: zinc,
src/gpu/memory_plan.zig; the functions have its exported names, in snake case.
"""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantities import Tokens
from memfit.estimators.base.units import MAX_COUNT
from memfit.estimators.results.result import Result

RequestAdmission = Literal["admitted", "shortened", "refused"]


class RequestBudget(Struct, frozen=True):
    """The tokens a request may generate, and the context to allocate."""

    completion_tokens: Tokens
    context_tokens: Tokens


class RequestPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-request/1"):
    """The result of ``memfit plan request``."""

    used_tokens: Tokens
    requested_tokens: Tokens
    capacity_tokens: Tokens
    remaining_tokens: Tokens
    budget: RequestBudget
    missing_tokens: Tokens
    """Tokens by which the capacity is too small for the whole request."""
    admission: RequestAdmission
    reason: str


def remaining_context_tokens(used: int, capacity: int) -> int:
    """Return the free tokens of a window, 0 when it is full.

    >>> remaining_context_tokens(100, 4096)
    3996
    """
    return max(0, capacity - used)


def clamped_completion_tokens(used: int, requested: int, capacity: int) -> int:
    """Return how many of the requested tokens fit in the window.

    >>> clamped_completion_tokens(4090, 64, 4096)
    6
    """
    return min(requested, remaining_context_tokens(used, capacity))


def request_context_target(used: int, requested: int, capacity: int) -> int:
    """Return the context to allocate: prompt and completion, at most the capacity.

    >>> request_context_target(32, 64, 4096)
    96
    """
    return min(used + clamped_completion_tokens(used, requested, capacity), capacity)


def request_budget(used: int, requested: int, capacity: int) -> RequestBudget:
    """Return the completion and the context target of a request."""
    return RequestBudget(
        clamped_completion_tokens(used, requested, capacity),
        request_context_target(used, requested, capacity),
    )


def plan_request(used: int, requested: int, capacity: int) -> RequestPlan:
    """Return the answer of a server to a request.

    A request is shortened when only a part of its completion fits, and refused when the prompt
    does not fit or no token could be generated.

    Raises:
        InputError: when a count is negative or beyond 2^40.
    """
    for what, tokens in (("used", used), ("requested", requested), ("capacity", capacity)):
        if not 0 <= tokens <= MAX_COUNT:
            raise InputError(f"{what} of {tokens} tokens: give from 0 to {MAX_COUNT}")
    budget = request_budget(used, requested, capacity)
    missing = max(0, used + requested - capacity)
    admission, reason = _admission(used, requested, capacity, budget)
    remaining = remaining_context_tokens(used, capacity)
    return RequestPlan(
        used_tokens=used,
        requested_tokens=requested,
        capacity_tokens=capacity,
        remaining_tokens=remaining,
        budget=budget,
        missing_tokens=missing,
        admission=admission,
        reason=reason,
    )


def _admission(
    used: int, requested: int, capacity: int, budget: RequestBudget
) -> tuple[RequestAdmission, str]:
    if used > capacity:
        return "refused", f"the {used} tokens used exceed the capacity of {capacity}"
    if budget.completion_tokens == requested:
        return "admitted", f"all of it fits in {capacity} tokens"
    if not budget.completion_tokens:
        return "refused", f"the window of {capacity} tokens is full"
    return "shortened", f"{budget.completion_tokens} of {requested} tokens fit in {capacity}"
