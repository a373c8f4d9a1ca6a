"""The context a runtime chooses by itself, and the one its budget pays for."""

from memfit.estimators.base.records import record
from memfit.estimators.base.units import round_down
from memfit.estimators.runtimes.growth import align_budget, align_capacity


@record(frozen=True, slots=True)
class Automatic:
    """A runtime's own context, the right one, and why they differ (empty: they do not).

    ``budget_bytes`` is what the runtime gives itself; None for either where there is none.
    """

    budget_bytes: int
    tokens: int | None
    right_tokens: int
    reason: str = ""


def foundry_context(budget_bytes: int, bytes_per_token: int, ceiling: int) -> Automatic:
    """Return Foundry's context for a budget of its cache alone.

    It divides and then aligns up to 128, at least one token; memfit aligns down.
    Source: Foundry, ContextConfig::apply_memory_budget.

    >>> foundry_context(200 * 1024, 1024, 4096).tokens
    256
    """
    if not bytes_per_token:
        return Automatic(budget_bytes, ceiling, ceiling)
    paid = budget_bytes // bytes_per_token
    its_own = min(align_capacity(paid), ceiling) if paid else 1
    right = min(align_budget(paid), ceiling)
    if its_own <= paid:
        return Automatic(budget_bytes, its_own, its_own)
    excess = align_capacity(its_own) * bytes_per_token - budget_bytes
    return Automatic(
        budget_bytes,
        its_own,
        right,
        f"Foundry aligns up after dividing: {excess} bytes above its budget of {budget_bytes}",
    )


def pool_context(budget_bytes: int, bytes_per_token: int, ceiling: int, step: int) -> Automatic:
    """Return the context that a pool of pages or blocks holds."""
    tokens = round_down(budget_bytes // bytes_per_token, step) if bytes_per_token else ceiling
    tokens = max(0, min(tokens, ceiling))
    return Automatic(max(0, budget_bytes), tokens, tokens)
