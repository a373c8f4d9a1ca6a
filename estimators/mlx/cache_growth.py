"""How many tokens a buffer of keys and values has room for, at any point of mlx-lm's loop.

Source of every rule: mlx-lm models/cache.py, `update_and_fetch` of each class. What a buffer does
for each chunk is `grown`; the rest follows from it without a walk over all chunks.
"""

from memfit.estimators.arch.caches import STEP, Growth, KVBuffer
from memfit.estimators.base.units import ceil_div, round_down, round_up
from memfit.estimators.base.workload import Workload


def capacity_at(buffer: KVBuffer, workload: Workload, position: int) -> int:
    """Return the tokens there is room for once ``position`` tokens of a run have passed.

    All of the prompt but its last token comes in chunks, every later token alone.
    """
    prefilled = min(position, workload.prompt_tokens - 1)
    capacity = _after_chunks(buffer, workload.prefill_step, prefilled)
    return grown_singly(buffer, capacity, prefilled, position - prefilled)


def grown(buffer: KVBuffer, capacity: int, position: int, chunk: int) -> int:
    """Return the capacity after ``chunk`` tokens at once are added at ``position``.

    >>> grown(KVBuffer(8, 128, 128), 2048, 2000, 100)
    2256
    """
    limit = buffer.limit
    if buffer.growth is Growth.ROWS:
        return buffer.held_tokens(position + chunk)
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
    if not count:
        return capacity
    end = position + count
    if buffer.growth is Growth.ROWS:
        return buffer.held_tokens(end)
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


def _after_chunks(buffer: KVBuffer, step: int, tokens: int) -> int:
    """Return the capacity after ``tokens`` in chunks of ``step``, the last of what is left."""
    if step == 1 or not tokens:
        return grown_singly(buffer, 0, 0, tokens)
    chunk = (tokens - 1) % step + 1
    start, limit = tokens - chunk, buffer.limit
    if limit is None or (buffer.growth is Growth.CHUNKED and start <= limit):
        before = _after_whole_chunks(step, start)
    else:
        before = min(start, limit - 1 + step)
    return grown(buffer, before, start, chunk)


def last_growing_chunk(step: int, tokens: int) -> int:
    """Return where the last of the whole chunks of ``tokens`` begins that makes a KVCache grow.

    >>> last_growing_chunk(2048, 4096), last_growing_chunk(128, 4096), last_growing_chunk(128, 4224)
    (2048, 3840, 4096)
    """
    return _whole_chunks(step, round_down(tokens, step))[1]


def _after_whole_chunks(step: int, tokens: int) -> int:
    """Return the capacity of a KVCache after ``tokens``, a multiple of ``step``."""
    return _whole_chunks(step, tokens)[0]


def _whole_chunks(step: int, tokens: int) -> tuple[int, int]:
    """Return a KVCache's capacity after whole chunks, and where the last began that grew it."""
    capacity = done = grew = 0
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
