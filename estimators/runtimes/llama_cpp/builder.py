"""What the graphs of all kinds of layers are built with."""

from functools import cached_property
from typing import NamedTuple

from memfit.estimators.arch.specs import Attention, LatentAttention
from memfit.estimators.machine.device import Backend
from memfit.estimators.runtimes.llama_cpp.caches import CacheTypes, Cells, cell_widths
from memfit.estimators.runtimes.llama_cpp.ggml import Graph, Place, Stored, Tensor
from memfit.estimators.runtimes.llama_cpp.placement import Weights

# ggml-cuda.cu and ggml-metal-device.m, GGML_OP_OFFLOAD_MIN_BATCH: of each operation.
_LEAST_OFFLOADED_ROWS = 32
FLOAT = 4  # activations are float32
_INDEX = 8  # of a row that is written to a cache
_METAL_QUERIES, _METAL_GROUPS = 32, 32  # ggml_metal_op_flash_attn_ext_extra_tmp


class CacheInputs(NamedTuple):
    """What attention over caches of one length reads of the program's inputs."""

    mask: Tensor
    rows: tuple[Tensor, Tensor]
    """The rows of the caches that keys and values are written to."""


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
        self, context: Context, weights: Weights, hidden: int, *, backend: Backend
    ) -> None:
        self.graph, self.weights, self.hidden, self.backend = Graph(), weights, hidden, backend
        self.room, self.types, self.flash, self.outputs, _ = context
        room = context.room
        self.rows = room.rows
        """Rows of the results: tokens, or outputs at the end of the last layer."""
        self.positions = self.graph.input(4 * room.rows)
        self.place = self.experts_place = Place.HOST
        """Where the layer's weights and cache are, and where its experts are."""
        self._inputs: dict[tuple[bool, int], CacheInputs] = {}

    def op(self, width: int, *sources: Tensor) -> Tensor:
        """Add an operation with ``width`` float32 numbers a row."""
        return self.graph.node(FLOAT * width * self.rows, *sources)

    def over(self, tensor: Tensor, *sources: Tensor) -> Tensor:
        """Add an operation that may be written over an operand."""
        return self.graph.node(tensor.nbytes, tensor, *sources, inplace=True)

    def product(self, name: str, tensor: Tensor, width: int) -> Tensor:
        """Add the product with a matrix of the layer."""
        elements = tensor.nbytes // (FLOAT * self.rows) * width
        weight = self.weight(name, elements, self.place)
        return self.placed(self.graph.matrix(FLOAT * width * self.rows, weight, tensor), self.place)

    def placed(self, tensor: Tensor, place: Place) -> Tensor:
        """Return an operation with a weight, which no GPU takes over for a few rows."""
        if self.rows < _LEAST_OFFLOADED_ROWS:
            tensor.place = place
        return tensor

    def weight(self, name: str, elements: int, place: Place) -> Stored:
        """Return a matrix of the layer."""
        return Stored(self.weights.of(f"{name}.weight", elements), place, is_weight=True)

    def norm(self, tensor: Tensor) -> Tensor:
        """Add a norm and its weight, which is too small to count."""
        normed = self.over(self.over(tensor), Stored(0, self.place, is_weight=True))
        return self.placed(normed, self.place)

    def convolved(self, tensor: Tensor, channels: int, kernel: int) -> Tensor:
        """Add a convolution: over the kept rows and the new ones together."""
        kept = FLOAT * channels * (kernel - 1) * self.room.sequences
        before = self.graph.node(kept, Stored(kept, self.place))
        window = self.graph.node(FLOAT * channels * self.rows + kept, before, tensor)
        # The kept rows are a strided view, which is copied whole to a state on the host.
        self.graph.write(self.place, window)
        return self.op(channels, window)

    def scan(self, width: int, state: int, *sources: Tensor, gathers: bool = False) -> Tensor:
        """Add a recurrence, which returns its output and the new states.

        ``gathers``: it reads a copy of the states of its sequences (build_rs).
        """
        states = FLOAT * state * self.room.sequences
        cache = Stored(states, self.place)
        read = self.graph.node(states, cache) if gathers else cache
        result = self.graph.node(FLOAT * width * self.rows + states, read, *sources)
        # The states of sequences that are not in the micro-batch, where all are of one (build_rs).
        others = FLOAT * state * (self.room.sequences - 1)
        self.graph.write(self.place, self.graph.node(others, cache))
        self.graph.write(self.place, result)
        return result

    def caches(self, spec: Attention | LatentAttention) -> tuple[Stored, ...]:
        """Return the cache of keys, and that of values if there is one."""
        cells = self.room.of(spec.window) * self.room.streams
        row_bytes = self.types.row_bytes(*next(cell_widths(spec)))
        return tuple(Stored(cells * nbytes, self.place) for nbytes in row_bytes)

    def inputs_of(self, spec: Attention | LatentAttention) -> CacheInputs:
        """Return the inputs that all attention over caches of this length shares."""
        cells = self.room.of(spec.window)
        # Without flash attention values are transposed: each element is a row of the cache.
        spread = 1 if self.flash else next(cell_widths(spec))[1] or 1
        slides = spec.window is not None
        if (slides, spread) not in self._inputs:
            index = _INDEX * self.room.rows
            self._inputs[slides, spread] = CacheInputs(
                self.graph.input((2 if self.flash else FLOAT) * cells * self.room.rows),
                (self.graph.input(index), self.graph.input(index * spread)),
            )
        return self._inputs[slides, spread]

    @cached_property
    def indexer_mask(self) -> Tensor:
        """The mask of the indexers' own cache, of f16 with flash attention."""
        return self.graph.input((2 if self.flash else FLOAT) * self.room.full * self.room.rows)

    def scratch(self, spec: Attention | LatentAttention, value_dim: int) -> int:
        """Bytes that the kernel of flash attention works with behind its result.

        Source: ggml-metal-ops.cpp, ggml_metal_op_flash_attn_ext_extra_*, which has room for a
        cache in f16 in any case; ggml-cuda/fattn.cu has it for a cache of another type.
        """
        keys, values = next(cell_widths(spec))
        cells = self.room.of(spec.window) * self.room.streams
        if self.place is Place.HOST or self.backend == "cpu":
            return 0
        if self.backend == "cuda":
            pairs = zip((keys, values), self.types, strict=True)
            return sum(2 * cells * width for width, name in pairs if name != "f16")
        groups = min(self.rows, _METAL_QUERIES) * spec.heads * self.room.streams
        partial = FLOAT * groups * _METAL_GROUPS * (value_dim + 2)
        return partial + 2 * cells * (keys + values)
