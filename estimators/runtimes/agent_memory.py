"""agent-memory: mlx-lm's classes over a pool of 4-bit blocks, with chunks that shrink."""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.context import AutoContext
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.runtimes.auto_context import pool_context, within
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.mlx_runtime import MlxRuntimeModel
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.workspace.peak import ERROR_PERCENT, peak

AGENT_MEMORY = Runtime(
    name="agent-memory",
    version="118e0b7d",
    prefill_step=2048,  # adapters/config/settings.py, chunked_prefill_max_chunk
    least_prefill_step=512,  # adapters/config/settings.py, chunked_prefill_min_chunk
    kv_step=256,  # domain/entities.py, BLOCK_SIZE_TOKENS
    kv_group_size=64,  # adapters/config/settings.py
    quantized_kv_start=0,
    kv_bits=4,  # adapters/config/settings.py
    growth="paged",
    charges="attention layers",
    budget=Budget("cache", bytes=8192 * 2**20),  # adapters/config/settings.py, cache_budget_mb
    keeps="live caches in unified memory, the others 4-bit on disk",
    allocates=(
        "blocks of 256 tokens of one layer, 4-bit with scales and biases, from a pool of 8 GiB"
    ),
    source="https://github.com/yshk-mxim/agent-memory, src/agent_memory",
    faults=("it states that 4 bits save 75 % of a cache; with scales and biases they save 71.9 %",),
)
# Positions from which its chunk is whole, half, a quarter and the least.
CHUNK_POSITIONS = (0, 2000, 8000, 20000)


class AgentMemory(TokenCacheModel, MlxRuntimeModel, frozen=True):
    """agent-memory; a window's cache is quantised too, its operations are counted as plain ones."""

    defaults = AGENT_MEMORY
    _workspace_basis = ("derived", ERROR_PERCENT)
    kv_bits = (4, 8)

    def token_bytes(self, workload: Workload, buffer: KVBuffer) -> int:
        step = self.runtime.kv_step
        keys, values = (buffer.heads * width * step for width in (buffer.key_dim, buffer.value_dim))
        bits, group = workload.kv_bits or 16, workload.kv_group_size
        return ceil_div(block_bytes(keys, values, bits=bits, group_size=group), step)

    def window_capacity(self, workload: Workload, window: int) -> int:
        return round_up(window, self.runtime.kv_step)

    def _allocation(self) -> Iterator[str]:
        return MlxRuntimeModel._allocation(self)

    def workspace(self, workload: Workload) -> int:
        """Return what the largest phase holds beyond the caches that the last one leaves.

        Its chunk shrinks from phase to phase: where chunks are large, caches are still small.
        """
        largest = kept = start = 0
        prompt, most = workload.prompt_tokens, workload.prefill_step
        for following in (*CHUNK_POSITIONS[1:], prompt):
            if start and start >= prompt - 1:
                break
            step = adaptive_chunk(start, largest=most, least=self.runtime.least_prefill_step)
            step = min(step, most)
            # Its last chunk may go beyond the position from which the next ones are smaller.
            start += round_up(max(0, following - start), step)
            # The last token of a prompt is in no chunk.
            phase = replace(workload, prompt_tokens=min(start + 1, prompt), prefill_step=step)
            moment = self._phase_moment(phase)
            largest, kept = max(largest, moment.nbytes), moment.nbytes - moment.workspace_bytes
        return max(0, largest - kept)

    def _phase_moment(self, workload: Workload) -> PeakMoment:
        model, footprint = self.subject.model, self.subject.footprint
        for bits in (workload.kv_bits, None):
            try:
                phase = replace(workload, kv_bits=bits)
                device = self.subject.device
                return peak(
                    model,
                    phase,
                    resident_bytes=0,
                    plan=footprint.plan,
                    device=device,
                    versions=self.runtime.versions,
                )
            except UnsupportedError:
                continue
        raise UnsupportedError(f"{model.model_type}: its workspace is not described")

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield whether the workload takes more blocks than the pool has."""
        needed, pool = figures.kv.nbytes, self.runtime.budget.bytes or 0
        if needed > pool:
            text = f"its caches take {needed} bytes of blocks, above the pool of {pool}"
            yield Note("warning", "pool", f"agent-memory would evict: {text}")

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return what its pool of blocks holds."""
        token, step = self.figures(workload).kv.bytes_per_token, self.runtime.kv_step
        budget = self.runtime.budget.of_device(device)
        return within(pool_context(budget, token, most, step), longest)


def block_bytes(
    key_elements: int, value_elements: int, *, bits: int = 4, group_size: int = 64
) -> int:
    """Return the bytes of a block: keys and values, with a 16-bit scale and bias a group.

    Elements are of all the block's tokens. At 16 bits there are no scales. Source: agent-memory,
    ModelCacheSpec.bytes_per_block_per_layer.

    >>> block_bytes(8 * 256 * 256, 8 * 256 * 256)
    589824
    """
    elements = key_elements + value_elements
    if bits == 16:
        return 2 * elements
    groups = ceil_div(key_elements, group_size) + ceil_div(value_elements, group_size)
    return ceil_div(elements * bits, 8) + 4 * groups


def adaptive_chunk(position: int, *, largest: int = 2048, least: int = 512) -> int:
    """Return the prefill chunk at a cache position. Source: agent-memory, adaptive_chunk_size.

    >>> adaptive_chunk(0), adaptive_chunk(2000), adaptive_chunk(8000), adaptive_chunk(20000)
    (2048, 1024, 512, 512)
    """
    _, half, quarter, end = CHUNK_POSITIONS
    if position < half:
        return largest
    if position < quarter:
        return max(least, largest // 2)
    return max(least, largest // 4) if position < end else least
