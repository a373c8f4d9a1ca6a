"""Bytes of the key-value cache, by mlx-lm's allocation rules."""

from collections import Counter

from memfit.estimators.arch.caches import Growth, KVBuffer
from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.cache_growth import capacity_at


@record(frozen=True, slots=True)
class KVCache:
    """The cache when a workload ends; ``held_bytes`` are of tokens still needed.

    ``bytes_per_token`` is what one more token adds where no window is full.
    """

    nbytes: int
    held_bytes: int
    bytes_per_token: int
    held_tokens: int
    allocated_tokens: int


def kv_buffers(model: Model, max_kv_size: int | None) -> list[KVBuffer]:
    """Return the buffers of all layers in order, ``max_kv_size`` applied as mlx-lm applies it."""
    buffers = list(model.kv_buffers())
    if max_kv_size is None or model.makes_own_cache:
        return buffers
    return [
        KVBuffer(b.heads, b.key_dim, b.value_dim, Growth.ROTATING, max_kv_size) for b in buffers
    ]


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
    # Layers are alike: each kind is computed once.
    buffers = Counter(kv_buffers(model, workload.max_kv_size))
    total = held = per_token = allocated_tokens = held_tokens = 0
    for buffer, layers in buffers.items():
        token_bytes = layers * buffer_token_bytes(model, buffer, workload, tokens)
        allocated = capacity_at(buffer, workload, tokens)
        needed = buffer.held_tokens(tokens)
        total += token_bytes * allocated * workload.batch
        held += token_bytes * needed * workload.batch
        per_token += token_bytes
        allocated_tokens = max(allocated_tokens, allocated)
        held_tokens = max(held_tokens, needed)
    return KVCache(total, held, per_token, held_tokens, allocated_tokens)


def buffer_token_bytes(model: Model, buffer: KVBuffer, workload: Workload, tokens: int) -> int:
    """Return the bytes one token of one sequence takes in a buffer that holds ``tokens``.

    A KVCache turns quantised once it holds ``quantized_kv_start`` tokens (mlx-lm generate.py,
    maybe_quantize_kv_cache): K and V packed, with a scale and a bias a group.
    """
    width = dtypes.nbytes(1, model.dtype)
    bits, group = workload.kv_bits, workload.kv_group_size
    if bits is None or tokens < workload.quantized_kv_start or _stays_plain(buffer):
        return buffer.elements_per_token * width
    _require_quantizable(model, buffer, group)
    dims = buffer.key_dim + buffer.value_dim
    return buffer.heads * (dims * bits // 8 + dims // group * 2 * width)


def _stays_plain(buffer: KVBuffer) -> bool:
    """Whether mlx-lm passes the buffer over: its class has no ``to_quantized``."""
    return buffer.in_cache_list or buffer.growth is Growth.CHUNKED


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
    raise UnsupportedError(f"{model.model_type}: {problem}; leave the KV bits away")
