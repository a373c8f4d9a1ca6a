"""The tokens a request may generate in a context window, and whether a server admits it.

All counts are tokens and saturate: no result is negative or above the capacity. Source: zinc,
src/gpu/memory_plan.zig, requestBudget and what it calls.
"""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import MAX_COUNT, Tokens
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


def plan_request(used: int, requested: int, capacity: int) -> RequestPlan:
    """Return the answer of a server to a request.

    A request is shortened when only a part of its completion fits, and refused when the prompt
    does not fit or no token could be generated.

    Raises:
        InputError: when a count is negative or beyond 2^40.

    >>> plan_request(4090, 64, 4096).budget
    RequestBudget(completion_tokens=6, context_tokens=4096)
    """
    for what, tokens in (("used", used), ("requested", requested), ("capacity", capacity)):
        if not 0 <= tokens <= MAX_COUNT:
            raise InputError(f"{what} of {tokens} tokens: give from 0 to {MAX_COUNT}")
    remaining = max(0, capacity - used)
    completion = min(requested, remaining)
    budget = RequestBudget(completion, min(used + completion, capacity))
    missing = max(0, used + requested - capacity)
    admission, reason = _admission(used, requested, capacity, budget)
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
