"""What one token adds to a cache under a runtime's rules: which layers, and how many bytes."""

from collections import Counter
from collections.abc import Iterator

from memfit.estimators.arch.caches import Growth, KVBuffer
from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.records import record
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import buffer_token_bytes, kv_buffers
from memfit.estimators.runtimes.growth import block_bytes
from memfit.estimators.runtimes.registry import (
    AGENT_MEMORY,
    FOUNDRY,
    LLAMA_CPP,
    VLLM,
    ZINC,
    Runtime,
)

_FLOAT8_BITS = 8


@record(frozen=True, slots=True)
class Charge:
    """Layers alike: the bytes of a token in one of them, and their window in tokens.

    ``room`` are the most tokens the layer ever has room for, where a window bounds it.
    """

    layers: int
    token_bytes: int
    window: int | None = None
    room: int | None = None

    def held_tokens(self, tokens: int) -> int:
        """Return the tokens still needed after ``tokens`` have passed."""
        return tokens if self.window is None else min(tokens, self.window)

    def allocated_tokens(self, capacity: int) -> int:
        """Return what a window leaves of a capacity."""
        return capacity if self.room is None else min(capacity, self.room)


def charges(model: Model, runtime: Runtime, workload: Workload) -> tuple[Charge, ...]:
    """Return what a runtime keeps of every token, alike layers together.

    Raises:
        UnsupportedError: for KV bits the runtime has no cache for.
    """
    if runtime.charges == "its own caches":
        return tuple(_mlx(model, workload))
    _require_bits(runtime, workload)
    found = Counter(_every(model) if runtime.charges == "every layer" else _attending(model))
    return tuple(
        Charge(
            layers,
            _token_bytes(model, runtime, workload, buffer),
            buffer.limit,
            _room(runtime, workload, buffer.limit),
        )
        for buffer, layers in found.items()
    )


def needed_bytes(model: Model, runtime: Runtime, workload: Workload) -> int:
    """Return the cache for the workload's tokens if only layers that attend had one.

    It is what a runtime that charges every layer could do with, in its own type.
    """
    buffers = Counter(_attending(model))
    tokens = workload.total_tokens
    return workload.batch * sum(
        layers * _token_bytes(model, runtime, workload, buffer) * buffer.held_tokens(tokens)
        for buffer, layers in buffers.items()
    )


def _mlx(model: Model, workload: Workload) -> Iterator[Charge]:
    for buffer, layers in Counter(kv_buffers(model, workload.max_kv_size)).items():
        token_bytes = buffer_token_bytes(model, buffer, workload, workload.total_tokens)
        yield Charge(layers, token_bytes, buffer.limit, buffer.limit)


def _attending(model: Model) -> Iterator[KVBuffer]:
    """The buffers of layers that attend, with their windows whatever mlx-lm does about them."""
    for mixer in model.mixers():
        growth = Growth.STEPS if mixer.window is None else Growth.ROTATING
        for buffer in mixer.kv_buffers() if mixer.owns_cache else ():
            yield KVBuffer(buffer.heads, buffer.key_dim, buffer.value_dim, growth, mixer.window)


def _every(model: Model) -> Iterator[KVBuffer]:
    """One full cache a layer, as wide as those of the layers that attend."""
    widest = max(_attending(model), key=lambda b: b.elements_per_token, default=None)
    for _ in model.layers if widest else ():
        assert widest is not None
        yield KVBuffer(widest.heads, widest.key_dim, widest.value_dim)


def _token_bytes(model: Model, runtime: Runtime, workload: Workload, buffer: KVBuffer) -> int:
    if runtime.name == AGENT_MEMORY:
        keys = buffer.heads * buffer.key_dim * runtime.kv_step
        values = buffer.heads * buffer.value_dim * runtime.kv_step
        bits, group = workload.kv_bits or 16, workload.kv_group_size
        block = block_bytes(keys, values, bits=bits, group_size=group)
        return ceil_div(block, runtime.kv_step)
    if runtime.name == VLLM and workload.kv_bits == _FLOAT8_BITS:
        return buffer.elements_per_token
    return dtypes.nbytes(buffer.elements_per_token, runtime.cache_dtype or model.dtype)


def _room(runtime: Runtime, workload: Workload, window: int | None) -> int | None:
    """The room of a layer with a window; zinc and Foundry keep every token all the same.

    Source: vLLM, SlidingWindowSpec.max_memory_usage_bytes; llama.cpp, llama-kv-cache-iswa.cpp.
    """
    if window is None or runtime.name in (ZINC, FOUNDRY):
        return None
    if runtime.name == VLLM:
        return round_up(window - 1 + workload.prefill_step, runtime.kv_step) + runtime.kv_step
    if runtime.name == LLAMA_CPP:
        return round_up(window + workload.prefill_step, runtime.kv_step)
    return round_up(window, runtime.kv_step)


def _require_bits(runtime: Runtime, workload: Workload) -> None:
    allowed = {AGENT_MEMORY: (None, 4, 8), VLLM: (None, _FLOAT8_BITS)}.get(runtime.name, (None,))
    if workload.kv_bits not in allowed:
        kept = ", ".join(str(bits) for bits in allowed if bits) or "none"
        raise UnsupportedError(
            f"KV bits {workload.kv_bits}: {runtime.name} quantises its cache to these: {kept}"
        )
    if workload.max_kv_size is not None:
        raise UnsupportedError(f"{runtime.name} has no limit of a rotating cache; leave it away")
