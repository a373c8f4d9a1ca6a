"""How ggml gives a graph its memory: one compute buffer in each memory.

Operations are placed on the host or on the GPU, the graph is split where the place changes, and
what the other side made is copied (ggml/src/ggml-backend.cpp, ggml_backend_sched_split_graph).
Then every tensor gets the smallest free block that holds it, takes over the room of an operand
used for the last time where its operation may, and is freed after its last use
(ggml/src/ggml-alloc.c, ggml_gallocr_alloc_graph_impl). Both at commit 0c1e57098.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from memfit.estimators.base.units import round_up
from memfit.estimators.machine.device import Backend

_ALIGNMENT = 128  # CUDA's; the CPU and Metal have 32
_ENDLESS = 1 << 62


class Place(IntEnum):
    """Where a tensor is, or an operation is computed."""

    HOST = 0
    GPU = 1


class Tensor:
    """A tensor of a graph; ``uses`` counts down while the graph is laid out."""

    __slots__ = (
        "inplace",
        "is_copy",
        "is_leaf",
        "is_listed",
        "kept",
        "matrix",
        "nbytes",
        "offset",
        "place",
        "root",
        "scratch",
        "sources",
        "uses",
    )

    def __init__(self, nbytes: int, sources: tuple["Tensor", ...] = ()) -> None:
        self.nbytes = nbytes
        self.sources = sources
        self.root: Tensor = self
        """What holds its bytes: another tensor where it is a view."""
        self.is_leaf = self.is_copy = self.is_listed = False
        """Whether no operation makes it, it is of the other memory, the graph has it already."""
        self.place: Place | None = None
        self.inplace = False
        """Whether the result may be written over an operand of the same size."""
        self.matrix = False
        """Whether it is the product with a weight."""
        self.scratch = 0
        """Bytes behind it that its kernel works with on a GPU."""
        self.kept = False
        """Whether it is an output, which is never freed."""
        self.uses = 0
        self.offset: int | None = None
        """Where it is in the compute buffer; None outside it."""


class View(Tensor):
    """A part or another shape of a tensor; no operation takes over the room of one."""

    __slots__ = ()

    def __init__(self, tensor: Tensor, nbytes: int) -> None:
        super().__init__(nbytes)
        self.root = tensor.root


class Stored(Tensor):
    """What needs no room in the compute buffer: a weight, a cache, a write over another tensor."""

    __slots__ = ("is_weight",)

    def __init__(
        self,
        nbytes: int,
        place: Place | None,
        sources: tuple[Tensor, ...] = (),
        *,
        is_weight: bool = False,
    ) -> None:
        super().__init__(nbytes, sources)
        self.place, self.is_weight = place, is_weight


class Sizes(NamedTuple):
    """Bytes of the compute buffers."""

    host: int
    gpu: int


class Graph:
    """The operations of one micro-batch.

    They are listed as ggml lists them: what is expanded, and before it all that it is made of
    (ggml.c, ggml_visit_parents_graph).
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.nodes: list[Tensor] = []

    def leaf(self, nbytes: int) -> Tensor:
        """Return a tensor that is not computed; it has its room before the graph runs."""
        tensor = Tensor(nbytes)
        tensor.is_leaf = True
        return tensor

    def input(self, nbytes: int) -> Tensor:
        """Return what the program fills in before the graph runs; it is on the host."""
        tensor = self.leaf(nbytes)
        tensor.place = Place.HOST
        return tensor

    def node(self, nbytes: int, *sources: Tensor, inplace: bool = False) -> Tensor:
        """Return the result of an operation."""
        tensor = Tensor(nbytes, sources)
        tensor.inplace = inplace
        return tensor

    def matrix(self, nbytes: int, weight: Tensor, *sources: Tensor) -> Tensor:
        tensor = self.node(nbytes, weight, *sources)
        tensor.matrix = True
        return tensor

    def write(self, place: Place | None, *sources: Tensor) -> None:
        """Write rows over a tensor: where a cache is, or anywhere."""
        self.expand(Stored(0, place, sources))

    def expand(self, tensor: Tensor) -> None:
        """List a tensor after what it is made of."""
        tensor = tensor.root
        if tensor.is_listed:
            return
        tensor.is_listed = True
        for source in tensor.sources:
            self.expand(source)
        if tensor.is_leaf:
            self.leaves.append(tensor)
        elif tensor.sources:
            self.nodes.append(tensor)

    def reserve(self, taking_over: Backend, *, with_gap: bool = False) -> Sizes:
        """Return the bytes of both compute buffers. A graph is laid out once.

        A GPU of that kind computes with weights of the host, which it copies; "cpu" is none.
        ``with_gap``: one more of the largest copy on the GPU, for a bound where smaller operations
        that are not described leave the room of one in pieces.
        """
        _assign(self.nodes, taking_over)
        nodes = list(_with_copies(self.nodes))
        sizes = _lay_out(self.leaves, nodes)
        copies = (node.nbytes for node in nodes if node.is_copy and node.place is Place.GPU)
        return sizes._replace(gpu=sizes.gpu + max(copies, default=0)) if with_gap else sizes


def _assign(nodes: list[Tensor], taking_over: Backend) -> None:
    """Give every operation its place: by its weight, then by its neighbours', the GPU's first."""
    for node in nodes:
        if node.place is None:
            node.place = _by_weight(node, taking_over)
    for only_gpu in (True, False):
        _spread(nodes, only_gpu=only_gpu)
        _spread(reversed(nodes), only_gpu=only_gpu)
    for node in nodes:
        if node.place is None:
            node.place = Place.HOST
        for source in node.sources:
            if source.is_leaf and source.place is None:
                source.place = node.place


def _by_weight(node: Tensor, taking_over: Backend) -> Place | None:
    """CUDA takes every operation with a weight, Metal products (offload_op of either)."""
    for source in node.sources:
        if isinstance(source, Stored) and source.is_weight:
            moved = taking_over == "cuda" or (taking_over == "metal" and node.matrix)
            return Place.GPU if moved else source.place
    return None


def _spread(nodes: Iterator[Tensor] | list[Tensor], *, only_gpu: bool) -> None:
    place: Place | None = None
    for node in nodes:
        if node.place is not None:
            place = None if only_gpu and node.place is Place.HOST else node.place
        elif place is not None:
            node.place = place


def _with_copies(nodes: list[Tensor]) -> Iterator[Tensor]:
    """Yield the operations, each split begun by copies of what it needs from the other memory."""
    copies: dict[int, Tensor] = {}
    split: list[Tensor] = []
    fetched: list[Tensor] = []
    place: Place | None = None
    for node in nodes:
        if node.place is not place or (fetched and _fetches_weight(node)):
            yield from (*fetched, *split)
            split, fetched, place = [], [], node.place
        sources = []
        for source in node.sources:
            from_place = source.root.place
            if from_place is not None and from_place is not place:
                if id(source) not in copies:
                    copies[id(source)] = copy = Tensor(source.nbytes)
                    copy.place, copy.is_copy = place, True
                    # The copy does not free its original before it is made.
                    fetched += (Stored(0, from_place, (source,)), copy)
                source = copies[id(source)]
            sources.append(source)
        node.sources = tuple(sources)
        split.append(node)
    yield from (*fetched, *split)


def _fetches_weight(node: Tensor) -> bool:
    return any(
        isinstance(source, Stored) and source.is_weight and source.place is not node.place
        for source in node.sources
    )


def _lay_out(leaves: list[Tensor], nodes: list[Tensor]) -> Sizes:
    buffers = {place: _Buffer() for place in Place}
    for node in nodes:
        if node.place is Place.HOST:
            node.scratch = 0
        for source in node.sources:
            source.root.uses += 1
    for tensor in leaves:
        tensor.offset = buffers[_place(tensor)].allocate(tensor.nbytes)
    for node in nodes:
        if not isinstance(node, Stored):
            _allocate(node, buffers)
        for source in (each.root for each in node.sources):
            source.uses -= 1
            if not source.uses and source.offset is not None and not source.kept:
                buffers[_place(source)].free(source.offset, source.nbytes + source.scratch)
                source.offset = None
    return Sizes(buffers[Place.HOST].peak, buffers[Place.GPU].peak)


def _allocate(node: Tensor, buffers: dict[Place, "_Buffer"]) -> None:
    if node.inplace:
        for source in node.sources:
            last = source.uses == 1 and not source.kept and source.offset is not None
            if last and source.nbytes == node.nbytes and not source.scratch:
                node.offset, source.offset = source.offset, None
                return
    node.offset = buffers[_place(node)].allocate(node.nbytes + node.scratch)


def _place(tensor: Tensor) -> Place:
    return Place.HOST if tensor.place is None else tensor.place


class _Buffer:
    """One compute buffer, while it is laid out; ggml leaves gaps around tensors of no bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._free: list[list[int]] = [[0, _ENDLESS]]  # offset and size

    def allocate(self, nbytes: int) -> int:
        """Return the offset of the smallest block that holds the bytes, the last one last."""
        size = round_up(nbytes, _ALIGNMENT)
        fitting = [
            (block[1], -index) for index, block in enumerate(self._free[:-1]) if block[1] >= size
        ]
        index = -min(fitting)[1] if fitting else len(self._free) - 1
        block = self._free[index]
        offset = block[0]
        block[0], block[1] = offset + size, block[1] - size
        if not block[1]:
            del self._free[index]
        self.peak = max(self.peak, offset + size)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give the bytes back to the first block they touch, else as a block of their own."""
        size = round_up(nbytes, _ALIGNMENT)
        for index, block in enumerate(self._free):
            if block[0] + block[1] == offset:
                block[1] += size
                self._join(index)
                return
            if offset + size == block[0]:
                block[0], block[1] = offset, block[1] + size
                if index:
                    self._join(index - 1)
                return
        index = sum(1 for block in self._free if block[0] < offset)
        self._free.insert(index, [offset, size])

    def _join(self, index: int) -> None:
        """Join a block with the next one if they touch."""
        after = self._free[index + 1 : index + 2]
        block = self._free[index]
        if after and block[0] + block[1] == after[0][0]:
            block[1] += after[0][1]
            del self._free[index + 1]
