"""Caches and states as llama.cpp allocates them, for the whole context and before the first token.

Source: llama.cpp src/llama-context.cpp (cells), llama-kv-cache.cpp, llama-kv-cache-iswa.cpp,
llama-kv-cache-dsa.cpp and llama-memory-recurrent.cpp (commit 0c1e57098).
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.gguf.ggml_types import BY_NAME, GgmlType

# What --cache-type-k and --cache-type-v of llama.cpp take (common/arg.cpp, kv_cache_types).
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# The symmetric type of those bits: the option means MLX's, which is symmetric.
_BY_BITS = {None: "f16", 8: "q8_0", 5: "q5_0", 4: "q4_0"}
_STATE_BYTES = 4  # recurrent states are always float32


class CacheTypes(NamedTuple):
    """The types keys and values are kept in, by llama.cpp's names."""

    keys: str
    values: str

    def row_bytes(self, keys: int, values: int) -> tuple[int, int]:
        """Return the bytes of rows of keys and of values, by their elements."""
        return _type(self.keys).nbytes(keys), _type(self.values).nbytes(values)


class Cells(Struct, frozen=True):
    """Room for tokens in one cache; ``sequences`` have each their own, unless it is unified."""

    full: int
    microbatch: int  # tokens computed at once
    sequences: int
    padding: int
    unified: bool = False
    swa_full: bool = False
    """Whether a sliding cache is as long as the others."""

    @property
    def streams(self) -> int:
        """Caches beside each other (llama-kv-cache.cpp, n_stream)."""
        return 1 if self.unified else self.sequences

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch, the same number of every sequence."""
        return round_up(self.microbatch, self.sequences)

    def of(self, window: int | None) -> int:
        """Return the cells of a cache, sliding or not.

        >>> Cells(4096, 512, 1, 256).of(128)
        768
        """
        if window is None or self.swa_full:
            return self.full
        return min(self.full, self.windowed(window))

    def windowed(self, window: int) -> int:
        """Return the most cells of a sliding cache: its windows and what is computed at once.

        Source: llama-kv-cache-iswa.cpp, size_swa.
        """
        windows = window * self.sequences // self.streams
        return round_up(windows + self.microbatch, self.padding)


class Buffer(Struct, frozen=True):
    """Keys and values of one layer: elements a cell, the cells, and the tokens held in them."""

    key_width: int
    value_width: int
    cells: int
    held: int

    def cell_bytes(self, types: CacheTypes) -> int:
        return sum(types.row_bytes(self.key_width, self.value_width))


class Caches(Struct, frozen=True):
    """All caches together; ``bytes_per_token`` is one more token where no window is full."""

    nbytes: int
    held_bytes: int
    bytes_per_token: int
    held_tokens: int
    cells: int
    largest_buffer_bytes: int


def cache_types(workload: Workload, given: CacheTypes | None) -> CacheTypes:
    """Return the types of the cache: those given, else by the workload's KV bits.

    Raises:
        UnsupportedError: for bits that llama.cpp has no type for.
    """
    if given is not None:
        return given
    name = _BY_BITS.get(workload.kv_bits)
    if name is None:
        raise UnsupportedError(
            f"KV bits {workload.kv_bits}: llama.cpp keeps its cache in 16, 8, 5 or 4 bits"
        )
    return CacheTypes(name, name)


def caches(
    model: Model, room: Cells, types: CacheTypes, tokens: int, *, flash: bool = True
) -> Caches:
    """Return the caches of a model for ``tokens`` tokens in each sequence."""
    found = list(buffers(model, room, tokens, flash=flash))
    sizes = [buffer.cell_bytes(types) for buffer in found]
    totals = [s * b.cells * room.streams for s, b in zip(sizes, found, strict=True)]
    return Caches(
        nbytes=sum(totals),
        held_bytes=sum(s * b.held * room.sequences for s, b in zip(sizes, found, strict=True)),
        bytes_per_token=sum(sizes),
        held_tokens=max((buffer.held for buffer in found), default=0),
        cells=max((buffer.cells for buffer in found), default=0),
        # One allocation for all layers of a kind: llama-kv-cache.cpp allocates a context whole.
        largest_buffer_bytes=sum(totals),
    )


def buffers(model: Model, room: Cells, tokens: int, *, flash: bool = True) -> Iterator[Buffer]:
    """Yield the buffers of all layers in order.

    Without flash attention values are transposed, and those of every layer as wide as the widest.
    """
    widest = max((values for m in model.mixers() for _, values in cell_widths(m)), default=0)
    for mixer in model.mixers():
        window = mixer.window
        cells = room.of(window)
        held = tokens if window is None or room.swa_full else min(tokens, window)
        for keys, values in cell_widths(mixer) if mixer.owns_cache else ():
            padded = widest if values and not flash else values
            yield Buffer(keys, padded, cells, held)


def cache_lines(
    model: Model, room: Cells, types: CacheTypes, tokens: int, *, flash: bool
) -> Iterator[str]:
    """Yield the lines that derive the caches and states."""
    caches = "unified cache" if room.unified else "sequences"
    for buffer, layers in Counter(buffers(model, room, tokens, flash=flash)).items():
        total = layers * buffer.cell_bytes(types) * buffer.cells * room.streams
        yield (
            f"KV of {layers} layers = {layers} x ({buffer.key_width} elements of {types.keys}"
            f" + {buffer.value_width} of {types.values}) = {layers} x {buffer.cell_bytes(types)}"
            f" bytes x {buffer.cells} cells x {room.streams} {caches} = {total} bytes"
        )
    states = filter(None, map(state_elements, model.mixers()))
    for state, layers in Counter(states).items():
        total = layers * sum(state) * _STATE_BYTES * room.sequences
        yield (
            f"state of {layers} layers = {layers} x {sum(state)} elements x {_STATE_BYTES} bytes"
            f" x {room.sequences} sequences = {total} bytes"
        )


def recurrent_bytes(model: Model, sequences: int) -> int:
    """Return the bytes of all recurrent states, which are float32."""
    return sequences * _STATE_BYTES * sum(state.elements for state in model.states())


def state_elements(mixer: Mixer) -> tuple[int, ...]:
    """Return the elements of a layer's states of one sequence."""
    return tuple(state.elements for state in mixer.states())


def cell_widths(mixer: Mixer) -> Iterator[tuple[int, int]]:
    """Elements of keys and of values a cell: a latent is all keys, as is an indexer's."""
    match mixer:
        case Attention():
            yield mixer.kv_heads * mixer.key_dim, mixer.kv_heads * mixer.value_dim
        case LatentAttention():
            yield mixer.latent_dim + mixer.rope_dim, 0
            if mixer.indexer:
                yield mixer.indexer.dim, 0
        case GatedDelta() | Recurrent():
            pass
        case TracedMixer():
            raise UnsupportedError(
                "llama.cpp's caches are not described for a model that only mlx-lm describes"
            )
        case _:
            assert_never(mixer)


def require_possible(model: Model, types: CacheTypes, *, flash: bool) -> None:
    """Check the types as llama-context.cpp, llama_init_from_model.

    Raises:
        UnsupportedError: when the model's cache cannot be of these types.
    """
    # Only a latent has keys without values.
    latent = any(not values for mixer in model.mixers() for _, values in cell_widths(mixer))
    if latent and types.keys != types.values:
        raise UnsupportedError(
            f"{model.model_type}: llama.cpp keeps a latent in one type, not keys in {types.keys}"
            f" and values in {types.values}"
        )
    for mixer in model.mixers():
        for width, name in zip(_head_widths(mixer), types, strict=True):
            if width % _type(name).block:
                raise UnsupportedError(
                    f"{model.model_type}: heads of {width} do not divide into the blocks of {name};"
                    " keep the cache in f16"
                )
    if not flash and _type(types.values).block > 1:
        raise UnsupportedError(
            f"{model.model_type}: llama.cpp quantises values only with flash attention, which"
            " does not run here; keep the values in f16"
        )


def can_be_fused(mixer: Mixer) -> bool:
    """Return whether its attention, if it has one, may run in one kernel."""
    match mixer:
        case Attention():
            return mixer.fused
        case LatentAttention() | GatedDelta() | Recurrent() | TracedMixer():
            return True
        case _:
            assert_never(mixer)


def _head_widths(mixer: Mixer) -> tuple[int, int]:
    match mixer:
        case Attention():
            return mixer.key_dim, mixer.value_dim
        case LatentAttention():
            return mixer.latent_dim + mixer.rope_dim, mixer.latent_dim
        case GatedDelta() | Recurrent() | TracedMixer():
            return 0, 0
        case _:
            assert_never(mixer)


def _type(name: str) -> GgmlType:
    return BY_NAME[name.upper()]
