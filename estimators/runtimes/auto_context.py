"""Contexts by fixed bytes and bytes a token: the longest in a budget, and a runtime's own."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.context import AutoContext, MemoryProfile

if TYPE_CHECKING:
    from memfit.estimators.runtimes.interface import MemoryFigures


def plain_profile(workload: Workload, figures: "MemoryFigures") -> "RuntimeMemoryProfile":
    """Return fixed bytes and bytes a token of figures that are all of one memory."""
    return RuntimeMemoryProfile(
        fixed_device_local_bytes=figures.ssm_bytes + figures.moment.workspace_bytes,
        fixed_host_visible_bytes=0,
        device_local_bytes_per_token=figures.kv.bytes_per_token * workload.batch,
        host_visible_bytes_per_token=0,
        gpu_ssm_bytes=figures.ssm_bytes,
    )


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

    def runtime_host_visible_bytes(self, context_tokens: int) -> int:
        """Return what buffers and tokens take in host memory."""
        return self.fixed_host_visible_bytes + context_tokens * self.host_visible_bytes_per_token

    def total_device_local_bytes(self, weights_bytes: int, context_tokens: int) -> int:
        """Return what weights, buffers and tokens take on the device."""
        tokens_bytes = context_tokens * self.device_local_bytes_per_token
        return weights_bytes + self.fixed_device_local_bytes + tokens_bytes

    def max_context_tokens_for_device_local_budget(
        self, weights_bytes: int, budget_bytes: int, ceiling: int
    ) -> int:
        """Return the largest context in a device's budget, at most the ceiling, 0 if none."""
        left = budget_bytes - weights_bytes - self.fixed_device_local_bytes
        if not ceiling or left <= 0:
            return 0
        token = self.device_local_bytes_per_token
        return min(left // token, ceiling) if token else ceiling
