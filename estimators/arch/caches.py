"""What a layer keeps between tokens: mlx-lm models/cache.py has the classes.

How many tokens a buffer has room for is mlx/cache_growth.py's.
"""

from enum import Enum

from memfit.estimators.base.records import record

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
