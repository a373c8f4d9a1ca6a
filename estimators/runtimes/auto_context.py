"""Contexts by fixed bytes and bytes a token: the longest in a budget, and a runtime's own."""

from msgspec.structs import replace

from memfit.estimators.base.units import round_down
from memfit.estimators.results.context import AutoContext, MemoryProfile


def within(own: AutoContext, longest: int) -> AutoContext:
    """Return the same with no more tokens than the ``longest`` context that fits the device."""
    if own.right_tokens <= longest:
        return own
    reason = f"with weights and workspace the device holds {longest} tokens"
    return replace(own, right_tokens=longest, reason="; ".join(filter(None, (own.reason, reason))))


def pool_context(budget_bytes: int, bytes_per_token: int, ceiling: int, step: int) -> AutoContext:
    """Return the context that a pool of pages or blocks of ``step`` tokens holds."""
    tokens = round_down(budget_bytes // bytes_per_token, step) if bytes_per_token else ceiling
    tokens = max(0, min(tokens, ceiling))
    return AutoContext(max(0, budget_bytes), tokens, tokens)


class RuntimeMemoryProfile(MemoryProfile, frozen=True, kw_only=True):
    """A memory profile with the contexts that follow from it, under zinc's names."""

    def device_local_context_bytes(self, context_tokens: int) -> int:
        return context_tokens * self.device_local_bytes_per_token

    def host_visible_context_bytes(self, context_tokens: int) -> int:
        """Return what tokens take in host memory."""
        return context_tokens * self.host_visible_bytes_per_token

    def runtime_device_local_bytes(self, context_tokens: int) -> int:
        return self.fixed_device_local_bytes + self.device_local_context_bytes(context_tokens)

    def runtime_host_visible_bytes(self, context_tokens: int) -> int:
        return self.fixed_host_visible_bytes + self.host_visible_context_bytes(context_tokens)

    def runtime_unified_bytes(self, context_tokens: int) -> int:
        """Return both, for one memory."""
        return self.runtime_device_local_bytes(context_tokens) + self.runtime_host_visible_bytes(
            context_tokens
        )

    def total_device_local_bytes(self, weights_bytes: int, context_tokens: int) -> int:
        return weights_bytes + self.runtime_device_local_bytes(context_tokens)

    def total_unified_bytes(self, weights_bytes: int, context_tokens: int) -> int:
        """Return weights and runtime in one memory."""
        return weights_bytes + self.runtime_unified_bytes(context_tokens)

    def max_context_tokens_for_device_local_budget(
        self, weights_bytes: int, budget_bytes: int, ceiling: int
    ) -> int:
        """Return the largest context in a device's budget, at most the ceiling, 0 if none."""
        return _max_context(
            budget_bytes - weights_bytes - self.fixed_device_local_bytes,
            self.device_local_bytes_per_token,
            ceiling,
        )

    def max_context_tokens_for_unified_budget(
        self, weights_bytes: int, budget_bytes: int, ceiling: int
    ) -> int:
        """Return the largest context when device and host share one budget."""
        return _max_context(
            budget_bytes
            - weights_bytes
            - self.fixed_device_local_bytes
            - self.fixed_host_visible_bytes,
            self.device_local_bytes_per_token + self.host_visible_bytes_per_token,
            ceiling,
        )


def _max_context(left: int, bytes_per_token: int, ceiling: int) -> int:
    if not ceiling or left <= 0:
        return 0
    return min(left // bytes_per_token, ceiling) if bytes_per_token else ceiling
