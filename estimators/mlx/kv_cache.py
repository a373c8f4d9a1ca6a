"""What a layer keeps between calls: KV caches, those of a batch, and recurrent states.

Source of every rule: mlx-lm models/cache.py, `update_and_fetch` of each class. What a buffer does
for each chunk is `grown`; the rest follows from it without a walk over all chunks.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import STEP, Growth, KVBuffer, StateBuffer
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div, round_down, round_up
from memfit.estimators.base.workload import Workload


def capacity_at(buffer: KVBuffer, workload: Workload, position: int) -> int:
    """Return the tokens there is room for once ``position`` tokens of a run have passed.

    All of the prompt but its last token comes in chunks, every later token alone. Cached tokens are
    there before the first.
    """
    prefilled = min(position, workload.prompt_tokens - 1)
    if buffer.growth is Growth.PROMPT and buffer.limit is not None:
        if prefilled > buffer.limit:
            prefilled = round_down(buffer.limit, workload.prefill_step)
        buffer, position = replace(buffer, growth=Growth.STEPS, limit=None), prefilled
    capacity = _after_chunks(buffer, workload.prefill_step, prefilled, workload.cached_tokens)
    return grown_singly(buffer, capacity, prefilled, position - prefilled)


def stored_tokens(buffer: KVBuffer, workload: Workload) -> int:
    """Return the most tokens that a stored cache of the cached ones has room for.

    Source: mlx-lm cache.py, BatchKVCache.extract and BatchRotatingKVCache.extract: all tokens, and
    of a window what the last chunk left, or fewer once a reply was generated.
    """
    if buffer.growth is Growth.ROTATING and buffer.limit is not None:
        return min(workload.cached_tokens, buffer.limit - 1 + workload.prefill_step)
    return buffer.held_tokens(workload.cached_tokens)


def grown(buffer: KVBuffer, capacity: int, position: int, chunk: int) -> int:
    """Return the capacity after ``chunk`` tokens at once are added at ``position``.

    >>> grown(KVBuffer(8, 128, 128), 2048, 2000, 100)
    2256
    """
    limit = buffer.limit
    if buffer.growth is Growth.ROWS:
        return buffer.held_tokens(position + chunk)
    if buffer.growth is Growth.PROMPT and limit is not None:
        # A single token, and all from the chunk on that passes the limit, are not kept.
        return (
            capacity
            if chunk == 1 or position + chunk > limit
            else _stepped(capacity, position, chunk)
        )
    if buffer.growth is Growth.DOUBLING:
        needed = position + chunk
        if needed <= capacity:
            return capacity
        doubled = 2 * max(capacity, chunk) if chunk >= STEP else 0
        return round_up(max(needed, doubled), STEP)
    if buffer.growth is Growth.ROTATING and limit is not None:
        if chunk == 1:
            return grown_singly(buffer, capacity, position, 1)
        # RotatingKVCache._update_concat: the window less one token, without unused room, then the
        # chunk.
        return min(position, limit - 1) + chunk
    if buffer.growth is Growth.CHUNKED and limit is not None:
        # The front is cut only when more than a chunk is held; the slack goes with it.
        capacity = limit if position > limit else capacity
        return _stepped(capacity, min(position, limit), chunk)
    return _stepped(capacity, position, chunk)


def grown_singly(buffer: KVBuffer, capacity: int, position: int, count: int) -> int:
    """Return the capacity after ``count`` tokens are added one by one.

    >>> grown_singly(KVBuffer(8, 128, 128), 2048, 2047, 129)
    2304
    """
    if not count or buffer.growth is Growth.PROMPT:
        return capacity
    end = position + count
    if buffer.growth is Growth.ROWS:
        return buffer.held_tokens(end)
    if buffer.growth is Growth.DOUBLING:
        return max(capacity, round_up(end, STEP))
    stepped = capacity + max(0, ceil_div(end - capacity, STEP)) * STEP
    if buffer.limit is None:
        return stepped
    if buffer.growth is Growth.CHUNKED:
        # Beyond the chunk every token cuts the front, and the buffer grows by one step again.
        return stepped if end <= buffer.limit + 1 else grown(buffer, capacity, end - 1, 1)
    return min(buffer.limit, max(capacity, stepped))


def _stepped(capacity: int, position: int, chunk: int) -> int:
    """KVCache: rows beyond the tokens are cut off before as many steps as needed are added."""
    if position + chunk <= capacity:
        return capacity
    kept = position if position % STEP else capacity
    return kept + round_up(chunk, STEP)


def _after_chunks(buffer: KVBuffer, step: int, tokens: int, cached: int) -> int:
    """Return the capacity after ``tokens``: the cached ones, and chunks of ``step``."""
    restored = buffer.held_tokens(cached)
    if step == 1 or tokens <= cached:
        return grown_singly(buffer, restored, cached, max(0, tokens - cached))
    chunk = (tokens - cached - 1) % step + 1
    start, limit = tokens - chunk, buffer.limit
    if buffer.growth is Growth.DOUBLING:
        before = _doubled(buffer, restored, cached, start, step)
    elif limit is None or (buffer.growth is Growth.CHUNKED and start <= limit):
        before = _whole_chunks(step, start, cached)[0]
    elif start == cached:
        before = restored
    else:
        before = min(start, limit - 1 + step)
    return grown(buffer, before, start, chunk)


def _doubled(buffer: KVBuffer, capacity: int, position: int, end: int, step: int) -> int:
    """Return the capacity after whole chunks of ``step`` from ``position`` to ``end``."""
    if step < STEP:
        return grown_singly(buffer, capacity, position, end - position)
    while position < end:
        capacity = grown(buffer, capacity, position, step)
        # All chunks for which there is room now.
        position += max(step, round_down(capacity - position, step))
    return capacity


def last_growing_chunk(step: int, tokens: int, cached: int = 0) -> int:
    """Return where the last whole chunk begins that makes a KVCache grow.

    It holds ``cached`` tokens before the chunks, and ``tokens`` after them.

    >>> last_growing_chunk(2048, 4096), last_growing_chunk(128, 4096), last_growing_chunk(128, 4224)
    (2048, 3840, 4096)
    """
    return _whole_chunks(step, cached + round_down(tokens - cached, step), cached)[1]


def _whole_chunks(step: int, tokens: int, cached: int) -> tuple[int, int]:
    """Return a KVCache's capacity after whole chunks, and where the last began that grew it.

    ``cached`` tokens fill it before them: a stored cache has no unused room (mlx-lm cache.py, the
    state of a KVCache, and BatchKVCache.merge).
    """
    capacity = done = grew = cached
    seen: dict[tuple[int, int], int] = {}
    while done < tokens:
        # The rule sees the position modulo STEP and the free rows: equal ones repeat as a cycle.
        cycle = done - seen.setdefault((done % STEP, capacity - done), done)
        skipped = (tokens - done) // cycle * cycle if cycle else 0
        done, capacity, grew = done + skipped, capacity + skipped, grew + skipped
        if done < tokens:
            capacity, grew = _stepped(capacity, done, step), done
            # All chunks for which there is room now.
            done = min(tokens, done + (capacity - done) // step * step)
    return capacity, grew


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
    """Return the cache once ``tokens`` of the run have passed, and what is stored beside it."""
    total = held = per_token = allocated_tokens = held_tokens = 0
    for buffer, layers in buffer_counts(model, workload.max_kv_size).items():
        token_bytes = layers * buffer_token_bytes(model, buffer, workload, tokens)
        allocated = capacity_at(buffer, workload, tokens)
        needed = buffer.held_tokens(tokens)
        total += token_bytes * allocated * workload.batch
        held += token_bytes * needed * workload.batch
        if workload.cached_tokens:
            stored = buffer_token_bytes(model, buffer, workload, workload.cached_tokens)
            stored *= layers * workload.batch * stored_tokens(buffer, workload)
            total, held = total + stored, held + stored
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
    if is_convertible(buffer) and is_quantised(workload, tokens):
        return KVFormat(width, workload.kv_bits, workload.kv_group_size)
    return KVFormat(width)


def kv_bits_apply(model: Model, max_kv_size: int | None) -> bool:
    """Whether KV bits reach any cache of a model, which mlx-lm then quantises or refuses."""
    return not all(map(_stays_plain, buffer_counts(model, max_kv_size)))


def is_convertible(buffer: KVBuffer) -> bool:
    """Whether mlx-lm can quantise the buffer."""
    return buffer.growth is Growth.STEPS and not buffer.in_cache_list


def is_quantised(workload: Workload, tokens: int) -> bool:
    """Whether caches that can be are quantised once they hold so many tokens."""
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


def state_bytes(model: Model, batch: int) -> int:
    """Return the bytes of all states of ``batch`` sequences."""
    return batch * sum(
        layers * dtypes.nbytes(state.elements, "F32" if state.float32 else model.dtype)
        for state, layers in model.state_counts.items()
    )


def view_elements(states: Iterable[StateBuffer], *, decoding: bool) -> int:
    """Return the elements per token of a chunk that states keep alive in addition to their own.

    A slice shares the buffer of the array it was cut from (mlx slicing.cpp), so that its nbytes
    are less than it holds; right to within one token. ``decoding`` is for what is left once single
    tokens follow: a compiled function takes over its input's buffer, whatever its size (mlx
    compiled.cpp, compiled_allocate_outputs), as Jamba's scan does.
    """
    return sum(s.view_elements for s in states if s.survives_decode or not decoding)


def view_bytes(model: Model, tokens: int) -> int:
    """Return what the states of a sequence keep alive after a call, in addition to their own."""
    return (
        tokens * view_elements(model.states(), decoding=tokens == 1) * dtypes.nbytes(1, model.dtype)
    )


class BatchBuffer(Struct, frozen=True):
    """The caches of a batch in every layer: keys and values, and states."""

    rows: int
    windows: tuple[tuple[int, int], ...] = ()
    """Of each window of the model, and the tokens its buffers have room for."""
    index: int = 0
    """Tokens written by BatchKVCache, padding included."""
    capacity: int = 0
    """Tokens BatchKVCache has room for."""
    offset: int = 0
    """Tokens written by BatchRotatingKVCache, which keeps the padding of rows that left."""
    viewed: int = 0
    """Tokens of the last call, where a state is a slice of all of them."""
    state_rows: int = 0
    """Rows of the states, where they are not ``rows``: a row of a state is a slice of all."""

    def grown(self, tokens: int, step: int = 1, *, padded: bool = False) -> "BatchBuffer":
        """Return the buffer after updates of up to ``step`` tokens each (cache.py).

        With ``padded`` some rows have fewer tokens, so that states are gathered, not cut.

        >>> BatchBuffer(1, ((512, 0),)).grown(1300, 700).windows
        ((512, 1111),)
        """
        last = (tokens - 1) % step + 1
        end, capacity = self.index + tokens, self.capacity
        if end > capacity:
            kept = capacity if self.index % STEP == 0 else self.index
            capacity = kept + round_up(tokens, STEP)
        # BatchRotatingKVCache: a chunk is joined with the window less one token, one token takes
        # the place of the oldest.
        windows = tuple(
            (
                limit,
                min(room + tokens - last, limit - 1) + last
                if step > 1
                else min(limit, room if self.offset < room else room + STEP),
            )
            for limit, room in self.windows
        )
        viewed = 0 if padded else last
        return BatchBuffer(self.rows, windows, end, capacity, self.offset + tokens, viewed)

    def decoded(self, tokens: int) -> "BatchBuffer":
        """Return the buffer after as many updates of one token.

        >>> buffer = BatchBuffer(1, ((512, 250),), 250, 256, 250).decoded(300)
        >>> buffer.index, buffer.capacity, buffer.windows
        (550, 768, ((512, 512),))
        """
        buffer = self
        while tokens:
            free = [room - buffer.offset for _, room in buffer.windows if room >= buffer.offset]
            step = min(tokens, max(0, buffer.capacity - buffer.index), *free) or 1
            buffer = replace(buffer.grown(step), windows=buffer.grown(1).windows, viewed=1)
            tokens -= step
        return buffer

    def kept(self, rows: int, longest: int) -> "BatchBuffer":
        """Return the buffer of some of its rows, which are copied (``filter``)."""
        room = self.capacity - (self.index - longest)
        return BatchBuffer(rows, self.windows, longest, room, self.offset)

    def joined(self, other: "BatchBuffer | None") -> "BatchBuffer":
        """Return the buffer of the rows of both, which are copied (``extend``)."""
        if other is None:
            return self
        return BatchBuffer(
            self.rows + other.rows,
            tuple(map(max, self.windows, other.windows)),
            max(self.index, other.index),
            max(self.capacity, other.capacity),
            max(self.offset, other.offset),
        )
