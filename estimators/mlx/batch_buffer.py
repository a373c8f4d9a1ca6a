"""The caches of a batch of mlx-lm, by what its batch generator does to them (models/cache.py)."""

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP
from memfit.estimators.base.units import round_up


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
