"""Caches as they are at any point of mlx-lm's loop, without the calls before it.

A model is run once to see what its caches hold for a token; then buffers get the lengths of
mlx/kv_cache.py. A class of cache that is not described there is refused.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from msgspec import Struct, field

from memfit.estimators.arch.specs import Growth, KVBuffer
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import capacity_at
from memfit.estimators.trace.leaves import caches_of
from memfit.estimators.trace.libraries import public_names

_GROWTH = {
    "KVCache": Growth.STEPS,
    "RotatingKVCache": Growth.ROTATING,
    "ChunkedKVCache": Growth.CHUNKED,
    # Of the batch generator; they grow as those of one sequence.
    "BatchKVCache": Growth.STEPS,
    "BatchRotatingKVCache": Growth.ROTATING,
    # Of mlx-vlm: models/hy_v4/cache.py and models/qwen4_exp/language.py.
    "HyV4KVCache": Growth.DOUBLING,
    "QSAKVCache": Growth.STEPS,
}

# An attribute for a cache that only chunks of prompts fill, up to so many tokens.
PROMPT_LIMIT = "prompt_limit"

# Recurrent states; the second until mlx-lm 0.30, the third of mlx-vlm's models/z1t/language.py.
STATE_CACHES = ("ArraysCache", "MambaCache", "Z1TCache")


class Rows(NamedTuple):
    """An array of a cache that grows along an axis, a row for every so many tokens."""

    name: str
    axis: int
    row_tokens: int = 1
    limit: int | None = None
    growth: Growth = Growth.ROWS
    is_open: bool = False
    """Whether it holds the tokens of the last row, until that is complete."""

    def length(self, workload: Workload, position: int) -> int:
        """Return its rows when ``position`` tokens have passed."""
        if self.is_open:
            return position % self.row_tokens
        buffer = KVBuffer(1, 1, 0, self.growth, self.limit, row_tokens=self.row_tokens)
        return capacity_at(buffer, workload, position)


def rows_of(cache: Any) -> tuple[Rows, ...]:
    """Return the arrays of a cache that grow by rules of their own, beside keys and values.

    Sources: mlx-lm models/deepseek_v41.py, LayerCache: a window, closed groups, an open one;
    mlx-vlm models/cache.py, PoolingCache: a row for a group of tokens; models/minimax_m3_vl/
    language.py and models/qwen4_exp/language.py: the keys of an indexer, and of its blocks.
    """
    match type(cache).__name__:
        case "LayerCache":
            groups = cache.compress_kv.shape[1] if cache.compress_kv is not None else 0
            ratio = cache.offset // groups if groups else 1
            return (
                Rows("window", 1, limit=cache.window_size),
                *(Rows(name, 1, ratio) for name in ("compress_kv", "index_k")),
                *(Rows(name, 1, ratio, is_open=True) for name in ("pending_kv", "pending_gate")),
            )
        case "PoolingCache":
            return (Rows("pooled", 1, cache.ratio),)
        case "MiniMaxM3KVCache":
            return (Rows("index_keys", 2, growth=Growth.STEPS),)
        case "QSAKVCache":
            return (
                Rows("index_keys", 1),
                Rows("index_position_ids", -1),
                Rows("index_block_keys", 2, cache.index_block_ratio or 1),
            )
    return ()


def leaves(caches: list[Any]) -> Iterator[Any]:
    """Yield the caches, those inside a CacheList or beside an indexer's one by one."""
    for cache in caches:
        # mlx-lm's CacheList: several caches of one layer.
        nested = getattr(cache, "caches", None)
        if nested is not None:
            yield from leaves(nested)
            continue
        if (keys_and_values := getattr(cache, "kv_cache", None)) is not None:
            yield from leaves([keys_and_values])
        yield cache


def batched(caches: list[Any], workload: Workload) -> list[Any]:
    """Return the empty caches of one sequence as those of mlx-lm's batch generator.

    A class that it cannot batch, and one sequence, keep their own, and so do KV bits, which it does
    not have (generate.py, _merge_caches).
    """
    can_merge = all(hasattr(cache, "merge") for cache in leaves(caches))
    if workload.batch == 1 or workload.kv_bits is not None or not can_merge:
        return caches
    return [cache.merge([cache] * workload.batch) for cache in caches]


def is_batched(cache: Any) -> bool:
    """Whether a cache is one of the batch generator, which has the padding of each sequence."""
    return getattr(cache, "left_padding", None) is not None


def buffer_of(cache: Any) -> KVBuffer | None:
    """Return the rule by which a cache of keys and values grows, None for other caches."""
    growth = _GROWTH.get(type(cache).__name__)
    if growth is None or cache.keys is None:
        return None
    # RotatingKVCache and ChunkedKVCache name their limit differently.
    limit = getattr(cache, "max_size", getattr(cache, "chunk_size", None))
    if (prompt_limit := getattr(cache, PROMPT_LIMIT, None)) is not None:
        growth, limit = Growth.PROMPT, prompt_limit
    _, heads, _, key_dim = cache.keys.shape
    return KVBuffer(heads, key_dim, cache.values.shape[3], growth, limit)


def length_of(cache: Any) -> int:
    """Return the tokens that a cache of keys and values has room for."""
    keys = getattr(cache, "keys", None)
    if keys is None:
        return int(cache.offset)
    # A quantised cache has packed words, scales and biases.
    return int((keys[0] if isinstance(keys, (list, tuple)) else keys).shape[-2])


class Stepper(Struct):
    """The caches of one model under one workload."""

    caches: list[Any]
    workload: Workload
    _originals: list[Any] = field(default_factory=list)

    def learn(self) -> None:
        """Keep the caches, filled by any call, as what every later state is made from."""
        self._originals = list(self.caches)
        # States have one size for any number of tokens.
        known = (*_GROWTH, *STATE_CACHES)
        for cache in leaves(self._originals):
            if type(cache).__name__ not in known and not rows_of(cache):
                raise undescribed(cache)

    def forget(self, stand_in: Callable[[Any], Any]) -> None:
        """Put other arrays in place of all that a recorded call left in the caches."""
        # A recorded array refers to its graph, which would live as long as the caches.
        # Plain caches are the originals themselves.
        converted = [a for a, b in zip(self.caches, self._originals, strict=True) if a is not b]
        for leaf in [*caches_of(converted), *caches_of(self._originals)]:
            leaf.put(stand_in(leaf.array))

    def jump(self, position: int) -> None:
        """Make the caches what they are when ``position`` tokens have passed."""
        # In place: call_recorder.py passes this list to the model. Converted caches become plain.
        self.caches[:] = self._originals
        for cache in leaves(self.caches):
            buffer = buffer_of(cache)
            if buffer:
                _fill(
                    cache,
                    buffer,
                    capacity_at(buffer, self.workload, position),
                    position,
                    self._last(position),
                )
            _fill_rows(cache, self.workload, position)
        self.quantize()

    def select_all(self) -> None:
        """Copy the caches of a batch, as it is done when the sequences begin to generate.

        Source: mlx-lm generate.py, PromptProcessingBatch.split.
        """
        if any(map(is_batched, leaves(self.caches))):
            for cache in self.caches:
                cache.filter(list(range(self.workload.batch)))

    def quantize(self) -> bool:
        """Quantise what mlx-lm would now; source: mlx-lm generate.py, maybe_quantize_kv_cache."""
        workload, before = self.workload, list(self.caches)
        if workload.kv_bits is None:
            return False
        for index, cache in enumerate(self.caches):
            # RotatingKVCache has it and raises, which becomes a message about --kv-bits.
            if hasattr(cache, "to_quantized") and cache.offset >= workload.quantized_kv_start:
                self.caches[index] = cache.to_quantized(
                    group_size=workload.kv_group_size, bits=workload.kv_bits
                )
        return any(a is not b for a, b in zip(before, self.caches, strict=True))

    def grows_at(self, position: int) -> bool:
        """Whether a buffer is allocated again for one token at ``position``."""
        workload = self.workload
        buffers = [buffer_of(cache) for cache in leaves(self._originals)]
        return any(
            capacity_at(buffer, workload, position) != capacity_at(buffer, workload, position + 1)
            for buffer in {buffer for buffer in buffers if buffer}
        )

    def _last(self, position: int) -> int:
        """Return the tokens of the call that ended at ``position``."""
        # After the prompt every call has one token.
        if position >= self.workload.prompt_tokens:
            return 1
        return position % self.workload.prefill_step or self.workload.prefill_step


def _fill(cache: Any, buffer: KVBuffer, length: int, position: int, last: int) -> None:
    import mlx.core as mx

    for name in ("keys", "values"):
        # mx.zeros is lazy: it takes no memory, and a recorded call gets it as an input.
        batch, heads, _, width = getattr(cache, name).shape
        setattr(cache, name, mx.zeros((batch, heads, length, width), getattr(cache, name).dtype))
    if is_batched(cache):
        # It counts tokens twice: in an array, of each sequence, and here.
        cache._idx = cache._offset = position
    else:
        cache.offset = min(position, length) if buffer.growth is Growth.PROMPT else position
    if buffer.growth is Growth.ROTATING:
        # The index of the next write, which it keeps in addition to the offset.
        keep = getattr(cache, "keep", 0)
        cache._idx = _rotated(length, position, last, cache.max_size, keep)
        cache.rotated = last == 1 and position > cache.max_size
    elif buffer.growth is Growth.CHUNKED:
        # Tokens cut from the front so far (ChunkedKVCache.maybe_trim_front).
        cache.start_position = max(0, position - last - cache.chunk_size)


def _rotated(length: int, position: int, last: int, window: int, keep: int) -> int:
    """Return where a rotating buffer is written next."""
    # A chunk is written in order; single tokens go round behind the first ``keep``.
    if last > 1:
        return length
    return position if position <= window else keep + (position - keep) % (window - keep)


def _fill_rows(cache: Any, workload: Workload, position: int) -> None:
    import mlx.core as mx

    for rows in rows_of(cache):
        array = getattr(cache, rows.name)
        if array is not None:
            shape = list(array.shape)
            shape[rows.axis] = rows.length(workload, position)
            setattr(cache, rows.name, mx.zeros(shape, array.dtype))
    # What classes count beside the tokens.
    match type(cache).__name__:
        case "LayerCache":
            cache.offset = position
        case "PoolingCache":
            cache.remainder = position % cache.ratio
        case "MiniMaxM3KVCache":
            cache.index_offset = position


def undescribed(cache: Any) -> UnsupportedError:
    """Return the refusal of a class of caches, by its name."""
    name = public_names(f"{type(cache).__module__}.{type(cache).__name__}")
    return UnsupportedError(f"{name}: the growth of this cache is not described")
