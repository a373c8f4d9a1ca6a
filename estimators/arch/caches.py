"""What a layer keeps between tokens, and how mlx-lm allocates it.

Source of every rule: mlx-lm models/cache.py (version in machine/runtime).
"""

from enum import Enum

from memfit.estimators.base.records import record
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.base.workload import Workload

STEP = 256


class Growth(Enum):
    """How a buffer grows with tokens."""

    STEPS = "steps"  # KVCache: in steps of 256, for ever
    ROTATING = "rotating"  # RotatingKVCache: up to a window
    CHUNKED = "chunked"  # ChunkedKVCache: trimmed to a chunk before each call


@record(frozen=True, slots=True)
class KVBuffer:
    """Keys and values of one layer: (batch, heads, tokens, key_dim + value_dim).

    ``limit`` is the window or chunk in tokens, None when the buffer grows for ever.
    ``listed`` marks a buffer inside a CacheList, which mlx-lm never quantises.
    """

    heads: int
    key_dim: int
    value_dim: int
    growth: Growth = Growth.STEPS
    limit: int | None = None
    listed: bool = False

    @property
    def elements_per_token(self) -> int:
        """Elements that one token of one sequence adds."""
        return self.heads * (self.key_dim + self.value_dim)

    def held_tokens(self, tokens: int) -> int:
        """Return the tokens still needed after ``tokens`` have passed."""
        return tokens if self.limit is None else min(tokens, self.limit)

    def allocated_tokens(self, workload: Workload) -> int:
        """Return the tokens the buffer has room for when the workload ends."""
        capacity = self.prefilled_tokens(workload)
        return self.grown_singly(capacity, workload.prompt_tokens - 1, workload.max_tokens + 1)

    def prefilled_tokens(self, workload: Workload) -> int:
        """Return the tokens it has room for before the last token of the prompt."""
        capacity = position = 0
        for chunk in workload.prefill_chunks():
            capacity = self.grown(capacity, position, chunk)
            position += chunk
        return capacity

    def grown(self, capacity: int, position: int, chunk: int) -> int:
        """Return the capacity after ``chunk`` tokens at once are added at ``position``.

        >>> KVBuffer(8, 128, 128).grown(2048, 2000, 100)
        2256
        """
        if self.growth is Growth.ROTATING and self.limit is not None:
            if chunk == 1:
                return self.grown_singly(capacity, position, 1)
            return min(capacity, self.limit - 1) + chunk
        if self.growth is Growth.CHUNKED and self.limit is not None:
            held = min(position, self.limit)
            # The front is cut only when more than a chunk is held; the slack goes with it.
            capacity = self.limit if position > self.limit else capacity
            return _stepped(capacity, held, chunk)
        return _stepped(capacity, position, chunk)

    def grown_singly(self, capacity: int, position: int, count: int) -> int:
        """Return the capacity after ``count`` tokens are added one by one.

        >>> KVBuffer(8, 128, 128).grown_singly(2048, 2047, 129)
        2304
        """
        end = position + count
        stepped = capacity + max(0, ceil_div(end - capacity, STEP)) * STEP
        if self.limit is None:
            return stepped
        if self.growth is Growth.CHUNKED:
            # Beyond the chunk every token cuts the front and grows by one step anew.
            return stepped if end <= self.limit + 1 else self.grown(capacity, end - 1, 1)
        return min(self.limit, max(capacity, stepped))


@record(frozen=True, slots=True)
class StateBuffer:
    """A recurrent or convolution state whose size does not depend on tokens.

    ``elements`` are of one sequence; ``float32`` states ignore the activations' type.
    ``viewed`` are the elements each token of a chunk adds to an array that the state is a slice
    of, and so keeps alive until the next call; ``lasting`` ones live on through decode.
    """

    elements: int
    float32: bool = False
    viewed: int = 0
    lasting: bool = False


def _stepped(capacity: int, position: int, chunk: int) -> int:
    if position + chunk <= capacity:
        return capacity
    kept = position if position % STEP else capacity
    return kept + round_up(chunk, STEP)
