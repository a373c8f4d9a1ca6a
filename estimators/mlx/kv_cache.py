"""Bytes of the key-value cache, by mlx-lm's allocation rules."""

from collections import Counter

from msgspec import Struct

from memfit.estimators.arch.caches import Growth, KVBuffer
from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.cache_growth import capacity_at

_WORD_BITS = 32


class KVCache(Struct, frozen=True):
    """The cache when a workload ends; ``held_bytes`` are of tokens still needed.

    ``bytes_per_token`` is what one more token adds where no window is full.
    """

    nbytes: int
    held_bytes: int
    bytes_per_token: int
    held_tokens: int
    allocated_tokens: int


class KVFormat(Struct, frozen=True):
    """How keys and values are stored."""

    width: int
    """Bytes of an activation, and of a scale or bias."""
    bits: int | None = None
    """None: not quantised."""
    group_size: int = 64

    def nbytes(self, elements: int) -> int:
        """Return the bytes of elements, with the scale and bias of each group."""
        if self.bits is None:
            return elements * self.width
        return elements * self.bits // 8 + elements // self.group_size * 2 * self.width

    def touched(self, elements: int) -> int:
        """Return the elements of the arrays that hold them: packed words, scales and biases."""
        if self.bits is None:
            return elements
        return elements * self.bits // _WORD_BITS + elements // self.group_size * 2


def buffer_counts(model: Model, max_kv_size: int | None) -> Counter[KVBuffer]:
    """Return how many there are of each buffer, ``max_kv_size`` applied as mlx-lm applies it."""
    counts: Counter[KVBuffer] = Counter()
    for buffer, layers in model.kv_buffer_counts.items():
        counts[limited(model, buffer, max_kv_size)] += layers
    return counts


def limited(model: Model, buffer: KVBuffer, max_kv_size: int | None) -> KVBuffer:
    """Return a buffer as make_prompt_cache makes it (mlx-lm models/cache.py)."""
    if max_kv_size is None or model.makes_own_cache:
        return buffer
    dims = (buffer.heads, buffer.key_dim, buffer.value_dim)
    return KVBuffer(*dims, Growth.ROTATING, max_kv_size)


def kv_cache(model: Model, workload: Workload) -> KVCache:
    """Return the cache of a model after a workload.

    Raises:
        UnsupportedError: when mlx-lm cannot quantise this model's cache as asked.
    """
    return _cache_at(model, workload, workload.total_tokens)


def prefilled_kv_cache(model: Model, workload: Workload) -> KVCache:
    """Return the cache when every chunk of the prompt is done, its last token not yet.

    Raises:
        UnsupportedError: as `kv_cache`.
    """
    return _cache_at(model, workload, workload.prompt_tokens - 1)


def _cache_at(model: Model, workload: Workload, tokens: int) -> KVCache:
    """Return the cache once ``tokens`` of the run have passed."""
    total = held = per_token = allocated_tokens = held_tokens = 0
    for buffer, layers in buffer_counts(model, workload.max_kv_size).items():
        token_bytes = layers * buffer_token_bytes(model, buffer, workload, tokens)
        allocated = capacity_at(buffer, workload, tokens)
        needed = buffer.held_tokens(tokens)
        total += token_bytes * allocated * workload.batch
        held += token_bytes * needed * workload.batch
        per_token += ceil_div(token_bytes, buffer.row_tokens)
        allocated_tokens = max(allocated_tokens, allocated * buffer.row_tokens)
        held_tokens = max(held_tokens, needed * buffer.row_tokens)
    return KVCache(total, held, per_token, held_tokens, allocated_tokens)


def buffer_token_bytes(model: Model, buffer: KVBuffer, workload: Workload, tokens: int) -> int:
    """Return the bytes one token of one sequence takes in a buffer that holds ``tokens``.

    Raises:
        UnsupportedError: when mlx-lm cannot quantise the buffer, also before it would: no command
            bounds how long its sequences become.
    """
    if workload.kv_bits is not None and not _stays_plain(buffer):
        _require_quantizable(model, buffer, workload.kv_group_size)
    width = dtypes.nbytes(1, model.dtype)
    return kv_format(buffer, workload, width, tokens).nbytes(buffer.elements_per_token)


def kv_format(buffer: KVBuffer, workload: Workload, width: int, tokens: int) -> KVFormat:
    """Return the format of a buffer that holds ``tokens``; ``width`` is of an activation.

    A KVCache is quantised once it holds ``quantized_kv_start`` tokens (mlx-lm generate.py,
    maybe_quantize_kv_cache).
    """
    if is_convertible(buffer) and _is_quantised(workload, tokens):
        return KVFormat(width, workload.kv_bits, workload.kv_group_size)
    return KVFormat(width)


def kv_bits_apply(model: Model, max_kv_size: int | None) -> bool:
    """Whether KV bits reach any cache of a model, which mlx-lm then quantises or refuses."""
    return not all(map(_stays_plain, buffer_counts(model, max_kv_size)))


def is_convertible(buffer: KVBuffer) -> bool:
    """Whether mlx-lm can quantise the buffer."""
    return buffer.growth is Growth.STEPS and not buffer.in_cache_list


def _is_quantised(workload: Workload, tokens: int) -> bool:
    # Caches are quantised after a call, so that an empty one never is.
    return workload.kv_bits is not None and tokens >= max(1, workload.quantized_kv_start)


def _stays_plain(buffer: KVBuffer) -> bool:
    """Whether mlx-lm leaves the buffer as it is: its class has no ``to_quantized``."""
    return buffer.in_cache_list or buffer.growth in (Growth.CHUNKED, Growth.ROWS)


def _require_quantizable(model: Model, buffer: KVBuffer, group: int) -> None:
    if buffer.growth is Growth.ROTATING:
        problem = "mlx-lm cannot quantise a rotating cache (it raises NotImplementedError)"
    elif not model.kv_quantizable:
        problem = "mlx-lm cannot attend over a quantised cache of this model"
    elif buffer.key_dim % group or buffer.value_dim % group:
        widths = f"{buffer.key_dim} and {buffer.value_dim}"
        problem = f"key and value widths {widths} are not multiples of the KV group size {group}"
    else:
        return
    raise UnsupportedError(f"{model.model_type}: {problem}; leave out KV bits")
