"""What the graphs of all kinds of layers are built with."""

from functools import cached_property
from typing import NamedTuple

from memfit.estimators.arch.mixer_kinds import attention_of
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import Attention, Indexer, LatentAttention
from memfit.estimators.checkpoint.gguf.ggml_types import BY_NAME
from memfit.estimators.machine.device import Backend
from memfit.estimators.runtimes.llama_cpp.caches import CacheTypes, Cells, cell_widths
from memfit.estimators.runtimes.llama_cpp.ggml import Graph, Place, Stored, Tensor, View
from memfit.estimators.runtimes.llama_cpp.overrides import place_of
from memfit.estimators.runtimes.llama_cpp.placement import Placement, Weights

# ggml-cuda.cu and ggml-metal-device.m, GGML_OP_OFFLOAD_MIN_BATCH: of each operation.
_LEAST_OFFLOADED_ROWS = 32
FLOAT = 4  # activations are float32
_INDEX = 8  # of a row that is written to a cache
_LEAST_ROTATION = 64  # llama-kv-cache.cpp, n_rot_k and n_rot_v
_TAPS = 4  # of a convolution, in all models that were published
_METAL_QUERIES, _METAL_GROUPS = 32, 32  # ggml_metal_op_flash_attn_ext_extra_tmp


class Rotations(NamedTuple):
    """Matrices that rotate what is written to quantised caches, None where nothing is rotated."""

    keys: Tensor | None
    values: Tensor | None


class CacheInputs(NamedTuple):
    """What attention over caches of one length reads of the program's inputs."""

    rotations: Rotations
    rows: tuple[Tensor, Tensor]
    """The rows of the caches that keys and values are written to."""
    mask: Tensor


class Context(NamedTuple):
    """What llama.cpp makes a context of."""

    room: Cells
    types: CacheTypes
    flash: bool
    outputs: int
    """The most rows of logits in a micro-batch."""
    mixed: bool = True
    """Whether a batch may mix tokens and embeddings: in build b11549, not yet at 0c1e57098."""


class Builder:
    """Adds operations to a graph; it is in one layer at a time."""

    def __init__(
        self, context: Context, weights: Weights, model: Model, placement: Placement
    ) -> None:
        self.graph, self.weights, self.placement = Graph(), weights, placement
        self.backend: Backend = placement.backend
        self.model, self.hidden = model, model.hidden_size
        self.slides = any(mixer.window for mixer in model.mixers())
        """Whether there are caches of two lengths (build_attn_inp_kv_iswa)."""
        self.room, self.types, self.flash, self.outputs, _ = context
        room = context.room
        self.rows = room.rows
        """Rows of the results: tokens, or outputs at the end of the last layer."""
        self.place = self.experts_place = Place.HOST
        """Where the layer's weights and cache are, and where its experts are."""
        self.layer = -1
        """The layer's index, -1 outside of all."""
        self.first_value: Tensor | None = None
        """The values of the first layer, which RWKV 7 reads in all others."""
        self._indexer_rotation: Tensor | None = None
        self._decays: tuple[Tensor, ...] | None = None
        self._cached: dict[bool, Place] = {}
        self._inputs: dict[tuple[bool, int], CacheInputs] = {}

    def nbytes(self, width: int) -> int:
        """Return the bytes of ``width`` float32 numbers a row."""
        return FLOAT * width * self.rows

    def op(self, width: int, *sources: Tensor) -> Tensor:
        """Add an operation with ``width`` float32 numbers a row."""
        return self.graph.node(self.nbytes(width), *sources)

    def over(self, tensor: Tensor, *sources: Tensor) -> Tensor:
        """Add an operation that may be written over an operand."""
        return self.graph.node(tensor.nbytes, tensor, *sources, inplace=True)

    def product(self, name: str, tensor: Tensor, width: int) -> Tensor:
        """Add the product with a matrix of the layer."""
        elements = tensor.nbytes // (FLOAT * self.rows) * width
        place = self.where(name, self.place)
        weight = self.weight(name, elements, place)
        return self.placed(self.graph.matrix(self.nbytes(width), weight, tensor), place)

    def where(self, name: str, usual: Place) -> Place:
        """Return where a matrix of the layer is."""
        block = f"blk.{self.layer}." if self.layer >= 0 else ""
        return place_of(self.placement.overrides, f"{block}{name}.weight", usual)

    @property
    def cache_place(self) -> Place:
        """Where the layer's caches and states are."""
        return self.place if self.placement.kv_offload else Place.HOST

    def placed(self, tensor: Tensor, place: Place, heads: int = 1) -> Tensor:
        """Return an operation with a weight, which no GPU takes over for a few rows."""
        if self.rows * heads < _LEAST_OFFLOADED_ROWS:
            tensor.place = place
        return tensor

    def weight(self, name: str, elements: int, place: Place) -> Stored:
        """Return a matrix of the layer."""
        return Stored(
            self.weights.of(f"{name}.weight", elements, self.layer), place, is_weight=True
        )

    def norm(self, tensor: Tensor) -> Tensor:
        """Add a norm and its weight."""
        return self.scaled(self.over(tensor))

    def scaled(self, tensor: Tensor, heads: int = 1) -> Tensor:
        """Add a product or a sum with a vector of weights, which all heads share."""
        width = tensor.nbytes // (FLOAT * self.rows) // heads
        return self.placed(self.over(tensor, self.vector(width)), self.place, heads)

    def biased(self, tensor: Tensor, name: str) -> Tensor:
        """Add the bias of a matrix, if the file has one."""
        return self.scaled(tensor) if f"{name}.bias" in self.weights.largest else tensor

    def vector(self, width: int) -> Stored:
        """Return a vector of weights, which are float32."""
        return Stored(FLOAT * width, self.place, is_weight=True)

    def view(self, tensor: Tensor, width: int | None = None) -> Tensor:
        """Return a part of a tensor, or all of it in another shape."""
        return View(tensor, tensor.nbytes if width is None else FLOAT * width * self.rows)

    def gathered(self, elements: int) -> Tensor:
        """Add a copy of the states of all sequences (build_rs)."""
        nbytes = FLOAT * elements * self.room.sequences
        cache = Stored(nbytes, self.cache_place)
        self.graph.write(self.cache_place, cache)
        states = self.graph.node(nbytes, cache, self.state_rows)
        self.graph.expand(states)
        # Nothing, where all sequences are in the micro-batch.
        self.graph.write(self.cache_place, View(states, 0))
        return states

    def convolved(self, kept: Tensor, tensor: Tensor, channels: int) -> Tensor:
        """Add a convolution over the kept rows and the new ones, which are joined."""
        nbytes = FLOAT * channels * self.rows
        window = self.graph.node(nbytes + kept.nbytes, View(kept, kept.nbytes), tensor)
        # The kept rows are a strided view, which is copied whole to a state on the host.
        self.graph.write(self.cache_place, window)
        taps = self.vector(channels * _TAPS)
        mixed = self.placed(self.op(channels, window, taps), self.place)
        return self.over(self.biased(mixed, "ssm_conv1d"))

    def scan(self, width: int, state: int, *sources: Tensor) -> Tensor:
        """Add a recurrence, which returns its output and the new states.

        It reads the states where they are. Those of sequences that are not in the micro-batch,
        where all are of one, are gathered behind it (build_rs).
        """
        states = FLOAT * state * self.room.sequences
        cache = Stored(states, self.cache_place)
        self.graph.write(self.cache_place, cache)
        nbytes = self.nbytes(width) + states
        result = self.graph.node(nbytes, cache, *sources, self.view(self.state_rows))
        self.graph.expand(result)
        others = FLOAT * state * (self.room.sequences - 1)
        gathered = self.graph.node(others, cache, self.view(self.state_rows))
        self.graph.write(self.cache_place, View(gathered, 0))
        self.graph.write(self.cache_place, View(result, states))
        return View(result, FLOAT * width * self.rows)

    def caches(self, spec: Attention | LatentAttention) -> tuple[Stored, ...]:
        """Return the cache of keys, and that of values if there is one."""
        cells = self.room.of(spec.window) * self.room.streams
        row_bytes = self.types.row_bytes(*next(cell_widths(spec)))
        # A layer without a cache of its own reads that of the last one before it with such cells.
        kind = spec.window is not None
        if spec.owns_cache:
            self._cached[kind] = self.cache_place
        place = self._cached.get(kind, self.cache_place)
        return tuple(Stored(cells * nbytes, place) for nbytes in row_bytes)

    def inputs_of(self, spec: Attention | LatentAttention) -> CacheInputs:
        """Return the inputs that all attention over caches of this length shares."""
        cells = self.room.of(spec.window)
        # Without flash attention values are transposed: each element is a row of the cache.
        spread = 1 if self.flash else next(cell_widths(spec))[1] or 1
        slides = spec.window is not None
        if (slides, spread) not in self._inputs:
            index = _INDEX * self.room.rows
            self._inputs[slides, spread] = CacheInputs(
                self._rotations(spec),
                (self.graph.input(index), self.graph.input(index * spread)),
                self.graph.input((2 if self.flash else FLOAT) * cells * self.room.rows),
            )
        return self._inputs[slides, spread]

    def _rotations(self, spec: Attention | LatentAttention) -> Rotations:
        """Source: llama-kv-cache.cpp, attn_rot_k and n_rot_k: of heads of one width."""
        alike = [
            each
            for each in map(attention_of, self.model.mixers())
            if each and (each.window is None) == (spec.window is None)
        ]
        widths = zip(*((each.key_dim, each.value_dim) for each in alike), strict=True)
        keys, values = (
            (_rotation(set(each), name) for each, name in zip(widths, self.types, strict=True))
            if alike
            else (0, 0)
        )
        values = min(values, _LEAST_ROTATION)
        rotations = (self.graph.input(FLOAT * size**2) if size else None for size in (keys, values))
        return Rotations(*rotations)

    def rotated(self, tensor: Tensor, rotation: Tensor | None) -> Tensor:
        """Add a rotation of heads, if there is one."""
        return self.graph.node(tensor.nbytes, rotation, tensor) if rotation else tensor

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token."""
        return self.graph.input(4 * self.room.rows)

    @cached_property
    def state_rows(self) -> Tensor:
        """The rows that states are read from."""
        return self.graph.input(4 * self.room.sequences)

    def decays(self, heads: int, tokens: int) -> tuple[Tensor, ...]:
        """The inputs of lightning attention: of heads, of their tokens, of pairs."""
        if self._decays is None:
            sizes = (1, tokens, tokens, tokens**2)
            self._decays = tuple(self.graph.input(FLOAT * heads * size) for size in sizes)
        return self._decays

    @cached_property
    def output_rows(self) -> Tensor:
        """The rows that go on after the last layer."""
        return self.graph.input(4 * self.outputs)

    @cached_property
    def indexer_mask(self) -> Tensor:
        """The mask of the indexers' own cache, which is f16 with and without flash attention."""
        return self.graph.input(2 * self.room.full * self.room.rows)

    @cached_property
    def indexer_rows(self) -> Tensor:
        """The rows of the indexers' cache that keys are written to."""
        return self.graph.input(_INDEX * self.room.rows)

    def indexer_rotation(self, spec: Indexer) -> Tensor:
        """The matrix that always rotates what indexers compare (llama-kv-cache.cpp)."""
        if self._indexer_rotation is None:
            self._indexer_rotation = self.graph.input(FLOAT * (spec.dim & -spec.dim) ** 2)
        return self._indexer_rotation

    def scratch(self, spec: Attention | LatentAttention, value_dim: int) -> int:
        """Bytes that a GPU's kernel of flash attention works with behind its result.

        Source: ggml-metal-ops.cpp, ggml_metal_op_flash_attn_ext_extra_*, which has room for a
        cache in f16 in any case; ggml-cuda/fattn.cu has it for a cache of another type.
        """
        keys, values = next(cell_widths(spec))
        if self.cache_place is Place.HOST:
            attention = attention_of(spec)
            values = attention.kv_heads * value_dim if attention else value_dim
        # A copy of a latent's values is not known to be a part of its keys.
        cells = self.room.of(spec.window) * self.room.streams
        if self.backend == "cpu":
            return 0
        if self.backend == "cuda":
            pairs = zip((keys, values), self.types, strict=True)
            return sum(2 * cells * width for width, name in pairs if name != "f16")
        groups = min(self.rows, _METAL_QUERIES) * spec.heads * self.room.streams
        partial = FLOAT * groups * _METAL_GROUPS * (value_dim + 2)
        return partial + 2 * cells * (keys + values)


def _rotation(widths: set[int], name: str) -> int:
    """The rows of the matrix that rotates heads, 0 where a cache is not quantised or of two widths.

    It is the largest power of two that divides a head, and at least 64.
    """
    (width,) = widths if len(widths) == 1 else (0,)
    if BY_NAME[name.upper()].block == 1 or width % _LEAST_ROTATION:
        return 0
    return width & -width
