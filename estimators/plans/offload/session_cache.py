"""Cached conversations: their bytes as a runtime stores them, and the peak of a restore."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import STEP, KVBuffer
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import ceil_div, round_down, round_up
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import (
    KVFormat,
    grown,
    grown_singly,
    is_convertible,
    state_bytes,
)
from memfit.estimators.runtimes.agent_memory import block_bytes
from memfit.estimators.sizing.search import first_fitting
from memfit.estimators.trace.dequantised_cache import StoredFormat, StoredRows, dequantised_peak

BLOCK_TOKENS = STEP
"""Of agent-memory as of mlx-lm."""
PLAIN_BITS = 16
STORED_BITS = (4, 8, PLAIN_BITS)
DEQUANTISED_FIRST = (
    "mlx-lm's class of this model, as those with latent attention, cannot attend over a quantised"
    " cache: a stored one is dequantised before its request, and takes 16 bits while that runs;"
    " fewer bits save room on the disk and in memory between requests only"
)
"""Of models that are not `kv_quantizable`."""
GROUP_SIZES = (64, 32, 128)
"""Those of MLX, mlx-lm's default first."""


class Held(Struct, frozen=True):
    """The cache of a conversation."""

    tokens: int
    rows: tuple[int, ...]
    """Of each kind of buffer, with the room that is not used."""
    nbytes: int
    """As it is stored."""


class Storage(Struct, frozen=True, dict=True):
    """How the conversations of a model are stored, in memory and on the disk.

    mlx-lm quantises only the caches that have a ``to_quantized``, and stores a cache with its
    unused room (cache.py, ``save_prompt_cache``). agent-memory quantises every layer.

    Raises:
        InputError: for bits or a group size that are not stored.
    """

    buffers: tuple[KVBuffer, ...]
    state_bytes: int
    """Recurrent states; they are not quantised."""
    plain_bytes: int
    """Bytes of an element that is not quantised."""
    bits: int = 4
    group_size: int = 64
    in_blocks: bool = False
    """Whether every layer is quantised, in whole blocks of 256 tokens, as agent-memory does."""
    prefill_step: int = 2048
    """Tokens of a prompt that mlx-lm adds to a cache at once: its caches grow by that."""

    def __post_init__(self) -> None:
        if self.bits not in STORED_BITS:
            raise InputError(f"{self.bits} bits: conversations are stored in 4, 8 or 16")
        if self.group_size not in GROUP_SIZES:
            raise InputError(f"group size {self.group_size}: MLX has groups of 32, 64 or 128")

    @cached_property
    def kinds(self) -> tuple[tuple[KVBuffer, int], ...]:
        """Each kind of buffer, and how many layers have it."""
        return tuple(Counter(self.buffers).items())

    @property
    def kept_group_size(self) -> int | None:
        """Values that are quantised together; None: none are, or not the same in all layers."""
        groups = {self.group_of(buffer, self.bits) for buffer in self.buffers} - {None}
        return groups.pop() if len(groups) == 1 else None

    @property
    def exact_buffers(self) -> int:
        """How many buffers are stored as they are."""
        return sum(self.group_of(buffer, self.bits) is None for buffer in self.buffers)

    def group_of(self, buffer: KVBuffer, bits: int) -> int | None:
        """Return the values of a buffer that are quantised together, None when it is not."""
        if bits == PLAIN_BITS:
            return None
        if self.in_blocks:
            return self.group_size
        if not is_convertible(buffer):
            return None
        widths = (buffer.key_dim, buffer.value_dim)
        groups = dict.fromkeys((self.group_size, *GROUP_SIZES))
        return next((size for size in groups if not any(width % size for width in widths)), None)

    def exact_bytes(self, tokens: int, bits: int) -> int:
        """Return the bytes of a conversation at ``bits``, without unused room."""
        return self.state_bytes + sum(
            count * self._row_bytes(buffer, buffer.held_tokens(tokens), bits)
            for buffer, count in self.kinds
        )

    def block_bytes(self, buffer: KVBuffer) -> int:
        """Return the bytes of one block of 256 tokens of a layer."""
        return self._row_bytes(buffer, BLOCK_TOKENS, self.bits)

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a conversation, over all layers."""
        return sum(
            ceil_div(buffer.held_tokens(tokens), BLOCK_TOKENS) * count
            for buffer, count in self.kinds
        )

    def stored_bytes(self, tokens: int) -> int:
        """Return the bytes of a conversation of one turn, as it is kept in memory."""
        return self.after(None, TraceRequest(tokens, 0)).nbytes

    def reused(self, held: Held | None, prompt_tokens: int) -> int:
        """Return the tokens of a conversation that a next prompt need not compute.

        The last token of a prompt is always computed. A longer conversation is cut to the prompt,
        which recurrent states and full windows cannot be (mlx-lm cache.py, ``is_trimmable``).
        """
        if held is None:
            return 0
        if held.tokens < prompt_tokens:
            return held.tokens
        is_cut = not self.state_bytes and all(
            buffer.limit is None or held.tokens < buffer.limit for buffer, _ in self.kinds
        )
        return prompt_tokens - 1 if is_cut else 0

    def after(self, held: Held | None, request: TraceRequest) -> Held:
        """Return the cache of a conversation once a request has used and extended it.

        mlx-lm computes a prompt in chunks, and its last token alone as those it generates.
        """
        reused = self.reused(held, request.prompt_tokens)
        rows = held.rows if held and reused else (0,) * len(self.kinds)
        extended = tuple(
            self._extended(buffer, each, reused, request)
            for (buffer, _), each in zip(self.kinds, rows, strict=True)
        )
        nbytes = self.state_bytes + sum(
            count * self._row_bytes(buffer, each, self.bits)
            for (buffer, count), each in zip(self.kinds, extended, strict=True)
        )
        return Held(request.total_tokens, extended, nbytes)

    def restore(self, tokens: int, device: Device) -> tuple[int, int]:
        """Return the peaks of a restore in bulk, and layer by layer, of a stored conversation."""
        held = self.after(None, TraceRequest(tokens, 0))
        rows = {kind: each for (kind, _), each in zip(self.kinds, held.rows, strict=True)}
        plain = [self._row_bytes(each, rows[each], PLAIN_BITS) for each in self.buffers]
        stored = [self._row_bytes(each, rows[each], self.bits) for each in self.buffers]
        made = {kind: self._dequantised([kind], rows, device) for kind, _ in self.kinds}
        bulk = sum(stored) + self._dequantised(self.buffers, rows, device)
        streaming = streaming_peak(plain, stored, [made[each] for each in self.buffers])
        return self.state_bytes + bulk, self.state_bytes + streaming

    def _dequantised(
        self, buffers: Iterable[KVBuffer], rows: Mapping[KVBuffer, int], device: Device
    ) -> int:
        """Return what one evaluation of all dequantised layers adds to the stored ones."""
        groups: defaultdict[int, list[StoredRows]] = defaultdict(list)
        for buffer in buffers:
            if group := self.group_of(buffer, self.bits):
                count = rows[buffer] * buffer.heads
                groups[group] += (
                    StoredRows(count, width) for width in (buffer.key_dim, buffer.value_dim)
                )
        dtype = "F32" if self.plain_bytes == 4 else "BF16"
        return sum(
            dequantised_peak(each, StoredFormat(self.bits, group, dtype), device)
            for group, each in groups.items()
        )

    def _extended(self, buffer: KVBuffer, rows: int, start: int, request: TraceRequest) -> int:
        """Return the rows of a buffer after a request of which ``start`` tokens are there."""
        if self.in_blocks:
            return round_up(buffer.held_tokens(request.total_tokens), BLOCK_TOKENS)
        end = request.prompt_tokens - 1
        for position in range(start, end, self.prefill_step):
            rows = grown(buffer, rows, position, min(self.prefill_step, end - position))
        return grown_singly(buffer, rows, end, request.total_tokens - end)

    def _row_bytes(self, buffer: KVBuffer, rows: int, bits: int) -> int:
        group = self.group_of(buffer, bits)
        if group is None:
            return rows * buffer.elements_per_token * self.plain_bytes
        if self.in_blocks:
            keys, values = (
                rows * buffer.heads * width for width in (buffer.key_dim, buffer.value_dim)
            )
            return block_bytes(keys, values, bits=bits, group_size=group)
        return KVFormat(self.plain_bytes, bits, group).nbytes(rows * buffer.elements_per_token)


def storage_of(
    model: Model, *, bits: int, group_size: int, in_blocks: bool = False, prefill_step: int = 2048
) -> Storage:
    """Return how conversations of a model are stored.

    Raises:
        InputError: for bits or a group size that are not stored.
        UnsupportedError: when the model has neither a KV cache nor states.
    """
    buffers, states = tuple(model.kv_buffers()), state_bytes(model, 1)
    if not buffers and not states:
        raise UnsupportedError(f"{model.model_type}: it keeps nothing between tokens")
    width = dtypes.nbytes(1, model.dtype)
    return Storage(buffers, states, width, bits, group_size, in_blocks, prefill_step)


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
