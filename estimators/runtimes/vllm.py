"""vLLM: pages of 16 tokens, from a pool of what weights and activations leave."""

from collections.abc import Iterator

from memfit.estimators.arch.caches import KVBuffer
from memfit.estimators.arch.model import Model
from memfit.estimators.base.units import round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.context import AutoContext
from memfit.estimators.runtimes.auto_context import pool_context, within
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel

VLLM = Runtime(
    name="vllm",
    version="002f10e0",
    prefill_step=2048,  # vllm/config/scheduler.py, DEFAULT_MAX_NUM_BATCHED_TOKENS
    kv_step=16,  # vllm/config/cache.py, DEFAULT_BLOCK_SIZE
    kv_group_size=64,
    quantized_kv_start=0,
    growth="paged",
    charges="attention layers",
    budget=Budget("memory", 92),  # vllm/config/cache.py, gpu_memory_utilization
    shares_prefix=True,  # vllm/config/cache.py, enable_prefix_caching
    keeps="everything on the GPU",
    allocates="pages of 16 tokens, from a pool that takes all the memory it may",
    source=(
        "https://github.com/vllm-project/vllm, vllm/config/cache.py and v1/kv_cache_interface.py"
    ),
)
_FLOAT8_BITS = 8


class Vllm(TokenCacheModel, frozen=True):
    """vLLM; its cache is quantised to float8 only."""

    defaults = VLLM
    kv_bits = (_FLOAT8_BITS,)

    @classmethod
    def token_bytes(
        cls, model: Model, runtime: Runtime, workload: Workload, buffer: KVBuffer
    ) -> int:
        """Return the bytes of a token in one buffer: one an element in float8."""
        if workload.kv_bits == _FLOAT8_BITS:
            return buffer.elements_per_token
        return TokenCacheModel.token_bytes(model, runtime, workload, buffer)

    @classmethod
    def window_capacity(cls, runtime: Runtime, workload: Workload, window: int) -> int:
        """Return the capacity. Source: SlidingWindowSpec.max_memory_usage_bytes."""
        return round_up(window - 1 + workload.prefill_step, runtime.kv_step) + runtime.kv_step

    def logit_rows(self, workload: Workload, rows: int) -> int:
        """Return the tokens that it keeps logits of: each sequence's last."""
        return workload.batch

    def allocation_rules(self) -> Iterator[str]:
        """Yield how it allocates and what its figures leave open."""
        yield from TokenCacheModel.allocation_rules(self)
        yield "one sequence's pages are counted; vLLM takes 92 % of the GPU's memory for its pool"

    def automatic_context(
        self, device: Device, figures: MemoryFigures, *, most: int, longest: int
    ) -> AutoContext:
        """Return what the pool holds that weights, states and workspace leave."""
        budget = self.runtime.budget.of_device(device)
        left = budget - self.resident_bytes - figures.moment.workspace_bytes - figures.ssm_bytes
        token, step = figures.kv.bytes_per_token, self.runtime.kv_step
        return within(pool_context(left, token, most, step), longest)
