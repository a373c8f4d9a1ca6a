"""What a layer keeps between tokens: mlx-lm models/cache.py has the classes.

How much room a buffer has after some tokens is in mlx/kv_cache.py.
"""

from enum import Enum

from msgspec import Struct

STEP = 256
"""Tokens by which every cache of mlx-lm grows (models/cache.py, ``step``)."""


class Growth(Enum):
    """How a buffer grows with tokens."""

    STEPS = "steps"  # KVCache: in steps, without a limit
    ROTATING = "rotating"  # RotatingKVCache: up to a window
    CHUNKED = "chunked"  # ChunkedKVCache: trimmed to a chunk before each call
    ROWS = "rows"  # deepseek_v41.py, LayerCache: as many rows as are needed

    @property
    def merges(self) -> bool:
        """Whether mlx-lm's batch generator takes such caches (generate.py, _merge_caches)."""
        return self in (Growth.STEPS, Growth.ROTATING)


class KVBuffer(Struct, frozen=True):
    """Keys and values of one layer: (batch, heads, tokens, key_dim + value_dim)."""

    heads: int
    key_dim: int
    value_dim: int
    growth: Growth = Growth.STEPS
    limit: int | None = None
    """The window or chunk in tokens; None when the buffer grows without a limit."""
    in_cache_list: bool = False
    """Whether it is inside a CacheList, which mlx-lm never quantises."""
    row_tokens: int = 1
    """Tokens that share a row; a row is complete with the last of them."""

    @property
    def elements_per_token(self) -> int:
        """Elements of one row, which is one token of one sequence in all kinds but ROWS."""
        return self.heads * (self.key_dim + self.value_dim)

    def held_tokens(self, tokens: int) -> int:
        """Return the rows still needed after ``tokens`` have passed."""
        rows = tokens // self.row_tokens
        return rows if self.limit is None else min(rows, self.limit)


class StateBuffer(Struct, frozen=True):
    """A recurrent or convolution state; its size does not depend on tokens."""

    elements: int
    """Of one sequence."""
    float32: bool = False
    """Whether it is float32 for any type of the activations."""
    view_elements: int = 0
    """Elements per token of the array that the state is a slice of, and so keeps alive."""
    survives_decode: bool = False
    """Whether that array stays alive when single tokens follow a chunk."""
