"""One primitive being evaluated: its arrays, and the buffers that its rule gives the outputs."""

from collections.abc import Callable, Iterable
from typing import Any

from memfit.estimators.mlx.kernels import SplitProducts, VectorAttention
from memfit.estimators.trace.layouts import Allocation, View
from memfit.estimators.trace.memory import Allocator

# By how many bytes a donated buffer may be larger than the output (mlx common/utils.h).
DONATION_SLACK = 16384


class Operation:
    """One primitive being evaluated; rules fill in the outputs' buffers and count its kernels."""

    __slots__ = (
        "arguments",
        "compiled_copies",
        "inputs",
        "kernels",
        "memory",
        "name",
        "outputs",
        "ropes_in_place",
        "splits",
        "temporaries",
        "temporary_elements",
        "vector_attention",
    )

    def __init__(
        self,
        memory: Allocator,
        *,
        splits: SplitProducts = SplitProducts(),  # noqa: B008 - a tuple
        vector_attention: VectorAttention = VectorAttention(),  # noqa: B008 - a tuple
        compiled_copies: bool = False,
        ropes_in_place: bool = False,
    ) -> None:
        self.memory = memory
        self.splits = splits
        self.vector_attention = vector_attention
        # Some versions of MLX write over no input of a compiled function: mlx/data/changes.py.
        self.compiled_copies = compiled_copies
        self.ropes_in_place = ropes_in_place
        self.name = ""
        self.arguments: tuple[Any, ...] = ()
        self.inputs: list[View] = []
        self.outputs: list[View] = []
        self.temporaries: list[Allocation] = []
        self.temporary_elements = 0
        self.kernels = 0

    def allocate(self, out: View, nbytes: int | None = None) -> None:
        """Give an output a buffer of its own; its layout was set before."""
        out.buffer = self.memory.allocate(out.nbytes if nbytes is None else nbytes)
        out.buffer.references += 1

    def share(self, out: View, source: View) -> None:
        """Give an output the buffer of an input."""
        out.buffer = source.buffer
        if out.buffer is not None:
            out.buffer.references += 1

    def temporary(self, elements: int, itemsize: int) -> None:
        """Allocate what lives until the device has run this operation."""
        self.temporary_elements += elements
        buffer = self.memory.allocate(elements * itemsize)
        # The stream releases it together with the inputs.
        buffer.references += 1
        self.temporaries.append(buffer)

    def add_parts(self, parts: int, itemsize: int) -> None:
        """Allocate partial products, which a second kernel adds up; one part is the product."""
        if parts > 1:
            self.temporary(parts * self.outputs[0].size, itemsize)
            self.kernels += 1

    def is_donatable(self, source: View, out: View | None = None) -> bool:
        """Whether the operation may write into an input: no other holds the array or its buffer.

        Source: mlx array.h, is_donatable; with an output, backend/common/utils.h, is_donatable.
        """
        buffer = source.buffer
        # The references of the array are its users in the graph, those of the buffer its views.
        if source.references != 1 or buffer is None or buffer.references != 1:
            return False
        return out is None or (source.itemsize == out.itemsize and self.is_near(source, out))

    def is_near(self, source: View, out: View) -> bool:
        """Whether the buffer of an input is little larger than an output."""
        assert source.buffer is not None
        return source.buffer.nbytes <= out.nbytes + DONATION_SLACK


Rule = Callable[[Operation], None]


def vector(op: Operation, source: View, out: View) -> None:
    """Take the input's layout, in its buffer when it can be donated, in a new one otherwise."""
    out.copy_layout(source)
    if op.is_donatable(source, out):
        op.share(out, source)
    else:
        # As many elements as the source has in memory; a broadcast source has few.
        op.allocate(out, source.data_size * out.itemsize)


def over_or_new(op: Operation, source: View, out: View) -> None:
    """Take the layout of an input of the same type, in its buffer when no other holds it."""
    out.copy_layout(source)
    if op.is_donatable(source):
        op.share(out, source)
    else:
        op.allocate(out, source.data_size * source.itemsize)


def over_any_or_new(op: Operation, sources: Iterable[View], out: View) -> None:
    """Write over the first input in rows that no other holds, or into a new array of rows."""
    donor = next((x for x in sources if x.row and op.is_donatable(x)), None)
    if donor:
        op.share(out, donor)
    else:
        op.allocate(out)


def fresh(op: Operation) -> None:
    """Allocate every output."""
    for out in op.outputs:
        op.allocate(out)
    op.kernels = 1


def copied(op: Operation, source: View, itemsize: int | None = None) -> None:
    """Copy an input; the copy lives until the device has run the operation."""
    op.temporary(source.size, itemsize or source.itemsize)
    op.kernels += 1
