"""One arena for all intermediates of a call: their lifetimes and offsets.

Placement is greedy by size for offset calculation: Pisarchyk and Lee, Efficient Memory Management
for Deep Neural Net Inference, 2020, section 5 (https://arxiv.org/abs/2001.03288).
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec import Struct

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import round_up
from memfit.estimators.machine.device import Backend
from memfit.estimators.trace.graph_format import Call, Node
from memfit.estimators.trace.layouts import Allocation
from memfit.estimators.trace.memory import Allocator

# Alignment of a buffer offset that every Mac supports (Metal feature set tables).
ALIGNMENT = 256
MAX_BUFFERS = 20_000
# "Growable list of MTLBuffer chunks (default 256MB initial size)"; Foundry's MB are 2**20 bytes.
POOL_CHUNK_BYTES = 256 * 2**20
# Views of their input; a static graph allocates nothing for them.
_VIEWS = frozenset(
    "Copy StopGradient Depends Broadcast BroadcastAxes Transpose Slice Split AsStrided ExpandDims"
    " Squeeze Reshape Flatten Unflatten View Contiguous".split()
)
# These write into their first input, which is a cache buffer.
_WRITES_INTO = frozenset(("SliceUpdate", "DynamicSliceUpdate"))
_LAST_INPUTS = "CustomTransforms"
# Calls that end with sampling a token; all others are prompt chunks.
_SAMPLING = ("last_token", "growing", "decode")

Use = Literal["intermediate", "cache", "input", "output", "weight", "constant"]


class Lifetime(NamedTuple):
    """A buffer that is alive from operation ``first``, which writes it, to its last reader."""

    operation: str
    nbytes: int
    first: int
    last: int


class PlacedBuffer(NamedTuple):
    """A buffer with its offset in the arena."""

    offset: int
    nbytes: int
    """With alignment."""
    buffer: Lifetime


class Arena(Struct, frozen=True):
    """The offsets of a call's intermediates."""

    nbytes: int
    lower_bound_bytes: int
    """The most bytes alive at once; no arena can be smaller."""
    separate_bytes: int
    """Bytes of one buffer per intermediate."""
    largest_bytes: int
    placed: tuple[PlacedBuffer, ...]


def arena(buffers: Sequence[Lifetime]) -> Arena:
    """Return the arena of buffers with their lifetimes.

    Raises:
        UnsupportedError: when there are more than ``MAX_BUFFERS``.
    """
    if len(buffers) > MAX_BUFFERS:
        raise UnsupportedError(
            f"{len(buffers)} intermediates in one call: at most {MAX_BUFFERS} are placed;"
            " lower the prefill step"
        )
    placed: list[PlacedBuffer] = []
    for buffer in sorted(buffers, key=lambda each: (-each.nbytes, each.first)):
        size = round_up(buffer.nbytes, ALIGNMENT)
        neighbours = [
            other
            for other in placed
            if other.buffer.first <= buffer.last and buffer.first <= other.buffer.last
        ]
        insort(
            placed, PlacedBuffer(_offset(neighbours, size), size, buffer), key=attrgetter("offset")
        )
    sizes = [each.nbytes for each in placed]
    return Arena(
        nbytes=max((each.offset + each.nbytes for each in placed), default=0),
        lower_bound_bytes=lower_bound(buffers),
        separate_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
        placed=tuple(placed),
    )


class PoolUse(NamedTuple):
    """What a pool takes that never frees a single buffer."""

    nbytes: int
    """Of all chunks."""
    wasted_bytes: int
    """At the ends of the chunks, and for alignment."""


def pool(buffers: Sequence[Lifetime]) -> PoolUse:
    """Return the chunks of Foundry's MemoryPool for the buffers of a call, until it is reset.

    A chunk is filled from its start, one buffer after another; what does not fit begins another
    chunk, of its own size where that is larger. Source: Foundry's memory architecture page, B.
    """
    chunks, used = 0, POOL_CHUNK_BYTES
    for buffer in sorted(buffers, key=lambda each: each.first):
        size = round_up(buffer.nbytes, ALIGNMENT)
        if used + size > POOL_CHUNK_BYTES:
            chunks, used = chunks + max(POOL_CHUNK_BYTES, size), 0
        used += size
    return PoolUse(chunks, chunks - sum(each.nbytes for each in buffers))


def by_mlx(buffers: Sequence[Lifetime], backend: Backend) -> int:
    """Return the most that MLX's own allocator has in use for the same buffers.

    It rounds each, and gives a freed one to the next that is not much smaller.
    """
    allocator = Allocator(backend)
    ends: dict[int, list[Allocation]] = defaultdict(list)
    starts: dict[int, list[Lifetime]] = defaultdict(list)
    for buffer in buffers:
        starts[buffer.first].append(buffer)
    for step in range(max((each.last for each in buffers), default=-1) + 1):
        for buffer in starts[step]:
            taken = allocator.allocate(buffer.nbytes)
            taken.references = 1
            ends[buffer.last].append(taken)
        for taken in ends[step]:
            allocator.release(taken)
    return allocator.peak


def _offset(neighbours: Iterable[PlacedBuffer], size: int) -> int:
    """The start of the smallest gap that is large enough, else the end of the last buffer."""
    end = 0
    best: tuple[int, int] | None = None
    for other in neighbours:
        gap = other.offset - end
        if gap >= size and (best is None or gap < best[0]):
            best = gap, end
        end = max(end, other.offset + other.nbytes)
    return end if best is None else best[1]


def lower_bound(buffers: Iterable[Lifetime]) -> int:
    """Return the most bytes that are alive at once, with alignment.

    >>> lower_bound([Lifetime("a", 256, 0, 1), Lifetime("b", 256, 1, 2), Lifetime("c", 256, 2, 3)])
    512
    """
    changes: list[tuple[int, int, int]] = []
    for buffer in buffers:
        size = round_up(buffer.nbytes, ALIGNMENT)
        changes += [(buffer.first, 0, size), (buffer.last, 1, -size)]
    live = most = 0
    for _, _, change in sorted(changes):
        live += change
        most = max(most, live)
    return most


class Needs(Struct, frozen=True):
    """What a call needs in addition to weights and caches."""

    intermediates: tuple[Lifetime, ...]
    input_bytes: int
    output_bytes: int
    constant_bytes: int


def needs(call: Call) -> Needs:
    """Return what a call of a recorded graph needs, with operations in recorded order."""
    owner = _owners(call)
    use = _uses(call, owner)
    first, last = _spans(call, owner)
    totals: dict[Use, int] = {}
    intermediates = []
    for position in sorted(set(owner)):
        nbytes = call.arrays[position].nbytes
        kind = use[position]
        if kind == "intermediate" and nbytes and position in first:
            node = call.nodes[first[position]].name
            intermediates.append(Lifetime(node, nbytes, first[position], last[position]))
        else:
            totals[kind] = totals.get(kind, 0) + nbytes
    return Needs(
        tuple(intermediates),
        totals.get("input", 0),
        totals.get("output", 0),
        totals.get("constant", 0),
    )


def _owners(call: Call) -> list[int]:
    """For each array the array that owns its buffer."""
    owner = list(range(len(call.arrays)))
    for node in call.nodes:
        for source, out in _shared(node):
            owner[out] = owner[source]
    return owner


def _shared(node: Node) -> Iterator[tuple[int, int]]:
    """Pairs of an input and an output that share one buffer."""
    if not node.inputs:
        return
    if node.name == _LAST_INPUTS:
        yield from zip(node.inputs[-len(node.outputs) :], node.outputs, strict=False)
    elif node.name == "Depends":
        yield from zip(node.inputs, node.outputs, strict=False)
    elif node.name in _VIEWS or node.name in _WRITES_INTO:
        yield from ((node.inputs[0], out) for out in node.outputs)


_BY_ROLE: dict[str, Use] = {
    "weight": "weight",
    "cache": "cache",
    "tokens": "input",
    "constant": "constant",
    "computed": "intermediate",
}


def _uses(call: Call, owner: list[int]) -> dict[int, Use]:
    """The use of each buffer; buffers that outlive the call are caches or outputs."""
    use = {position: _BY_ROLE[call.arrays[position].role] for position in set(owner)}
    sampled = call.evaluated if call.phase in _SAMPLING else ()
    ends: tuple[tuple[Iterable[int], Use], ...] = ((call.held, "cache"), (sampled, "output"))
    for positions, kind in ends:
        for position in positions:
            if use[owner[position]] in ("intermediate", "cache"):
                use[owner[position]] = kind
    return use


def _spans(call: Call, owner: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The first writer and the last user of each buffer."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, node in enumerate(call.nodes):
        for position in (*node.outputs, *node.inputs):
            last[owner[position]] = step
        for position in node.outputs:
            if owner[position] == position:
                first[position] = step
    return first, last
