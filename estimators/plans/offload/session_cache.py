"""Cached conversations: bytes in blocks as agent-memory stores them, and the peak of a restore."""

from collections.abc import Sequence
from itertools import chain

from msgspec import Struct

from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.recurrent_state import state_bytes
from memfit.estimators.runtimes.agent_memory import block_bytes
from memfit.estimators.sizing.search import first_fitting
from memfit.estimators.trace.dequantised_cache import Packing, StoredRows, dequantised_peak

BLOCK_TOKENS = 256
PLAIN_BITS = 16
STORED_BITS = (4, 8, PLAIN_BITS)
GROUP_SIZES = (32, 64, 128)


class LayerShape(Struct, frozen=True):
    """Keys and values of one layer."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """The most tokens the layer keeps."""

    def nbytes(self, tokens: int, bits: int, group_size: int, *, plain_bytes: int = 2) -> int:
        """Return the bytes of ``tokens``; keys and values are quantised in separate groups.

        ``plain_bytes`` is the size of an element that is not quantised.

        >>> shape = LayerShape(8, 256, 256)
        >>> shape.nbytes(256, 4, 64), shape.nbytes(256, 16, 64)
        (589824, 2097152)
        """
        keys, values = (tokens * self.heads * dim for dim in (self.key_dim, self.value_dim))
        if bits == PLAIN_BITS:
            return (keys + values) * plain_bytes
        return block_bytes(keys, values, bits=bits, group_size=group_size)

    def rows(self, tokens: int) -> tuple[StoredRows, StoredRows]:
        """Return keys and values of ``tokens`` as they are stored."""
        rows = self.held(tokens) * self.heads
        return StoredRows(rows, self.key_dim), StoredRows(rows, self.value_dim)

    def held(self, tokens: int) -> int:
        """Return how many of the tokens the layer keeps."""
        return tokens if self.window is None else min(tokens, self.window)


class Storage(Struct, frozen=True):
    """How the conversations of a model are stored.

    Raises:
        InputError: for bits or a group size that agent-memory does not store.
    """

    shapes: tuple[LayerShape, ...]
    state_bytes: int
    """Recurrent states; they are not quantised."""
    plain_bytes: int
    """Bytes of an element that is not quantised."""
    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in STORED_BITS:
            raise InputError(f"{self.bits} bits: conversations are stored in 4, 8 or 16")
        if self.group_size not in GROUP_SIZES:
            raise InputError(f"group size {self.group_size}: MLX has groups of 32, 64 or 128")

    @property
    def kept_group_size(self) -> int | None:
        """Values that are quantised together, None where none are."""
        return None if self.bits == PLAIN_BITS or not self.shapes else self.group_size

    def exact_bytes(self, tokens: int, bits: int) -> int:
        """Return the bytes of a conversation at ``bits``, without rounding to blocks."""
        return self.state_bytes + sum(self._layers(tokens, bits))

    def block_bytes(self, shape: LayerShape) -> int:
        """Return the bytes of one block of 256 tokens of a layer."""
        return shape.nbytes(BLOCK_TOKENS, self.bits, self.group_size, plain_bytes=self.plain_bytes)

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a conversation, over all layers."""
        return sum(ceil_div(shape.held(tokens), BLOCK_TOKENS) for shape in self.shapes)

    def stored_bytes(self, tokens: int) -> int:
        """Return the bytes of a conversation in whole blocks, as it is kept in memory."""
        return self.state_bytes + sum(
            ceil_div(shape.held(tokens), BLOCK_TOKENS) * self.block_bytes(shape)
            for shape in self.shapes
        )

    def restore(self, tokens: int, device: Device) -> tuple[int, int]:
        """Return the peaks of a restore in bulk, and layer by layer, of whole blocks.

        mlx-lm stores a cache with its unused room (cache.py, KVCache.state), which grows by as many
        tokens as a block has.
        """
        tokens = BLOCK_TOKENS * ceil_div(tokens, BLOCK_TOKENS)
        plain = self._layers(tokens, PLAIN_BITS)
        stored = self._layers(tokens, self.bits)
        if self.bits == PLAIN_BITS:
            return self.state_bytes + sum(plain), self.state_bytes + sum(plain)
        rows = [shape.rows(tokens) for shape in self.shapes]
        how = Packing(self.bits, self.group_size, "F32" if self.plain_bytes == 4 else "BF16")
        one = {each: dequantised_peak(each, how, device) for each in set(rows)}
        bulk = sum(stored) + dequantised_peak(chain.from_iterable(rows), how, device)
        streaming = streaming_peak(plain, stored, [one[each] for each in rows])
        return self.state_bytes + bulk, self.state_bytes + streaming

    def _layers(self, tokens: int, bits: int) -> list[int]:
        return [
            shape.nbytes(shape.held(tokens), bits, self.group_size, plain_bytes=self.plain_bytes)
            for shape in self.shapes
        ]


def storage_of(model: Model, *, bits: int, group_size: int) -> Storage:
    """Return how conversations of a model are stored.

    Raises:
        InputError: for bits or a group size that agent-memory does not store.
        UnsupportedError: when the model has neither a KV cache nor states.
    """
    shapes = tuple(
        LayerShape(buffer.heads, buffer.key_dim, buffer.value_dim, buffer.limit)
        for buffer in model.kv_buffers()
    )
    states = state_bytes(model, 1)
    if not shapes and not states:
        raise UnsupportedError(f"{model.model_type}: it keeps nothing between tokens")
    return Storage(shapes, states, dtypes.nbytes(1, model.dtype), bits, group_size)


def streaming_peak(plain: Sequence[int], stored: Sequence[int], made: Sequence[int]) -> int:
    """Return the peak when each stored layer is freed once its dequantized copy exists.

    ``made`` is what it takes to make each copy, the copy included.

    >>> streaming_peak([100, 100, 100], [28, 28, 28], [100, 100, 100])
    328
    """
    left, done, peak = sum(stored), 0, 0
    for plain_bytes, stored_bytes, made_bytes in zip(plain, stored, made, strict=True):
        peak = max(peak, done + made_bytes + left)
        done += plain_bytes
        left -= stored_bytes
    return peak


def longest_hot(storage: Storage, conversations: int, budget_bytes: int, most: int) -> int:
    """Return the longest conversations that stay in memory together, in tokens.

    A multiple of 256, at most ``most``; 0 when not even 256 tokens of each fit.
    """
    found = first_fitting(
        range(round_down(most, BLOCK_TOKENS), 0, -BLOCK_TOKENS),
        lambda tokens: conversations * storage.stored_bytes(tokens) <= budget_bytes,
        monotone=True,
    )
    return found or 0
