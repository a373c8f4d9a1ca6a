"""What MLX allocates while it dequantises stored keys and values.

A GPU has a kernel for it. The CPU has none: it shifts every value out of its word, as an integer of
four bytes, and joins these before it scales them (mlx ops.cpp, affine_dequantize).
"""

from collections.abc import Iterable
from typing import NamedTuple

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.trace.graph_format import Array, Call, Node, Role
from memfit.estimators.trace.peak import load_peak

_WORD_BITS = 32


class StoredRows(NamedTuple):
    """Keys or values of one layer."""

    rows: int
    width: int
    """Values in a row."""


class StoredFormat(NamedTuple):
    """How values are stored, and what they were."""

    bits: int
    group_size: int
    dtype: str


def dequantised_peak(stored: Iterable[StoredRows], how: StoredFormat, device: Device) -> int:
    """Return the most bytes that one evaluation of all adds to the stored ones.

    The device is taken as slow, so that for a CPU it is a bound.
    """
    graph = dequantising_graph(stored, how, device.backend)
    return load_peak(graph, device, MLX_VERSION, after_others=True)


def dequantising_graph(stored: Iterable[StoredRows], how: StoredFormat, backend: Backend) -> Call:
    """Return everything as one evaluation."""
    graph = _Graph(how)
    add = graph.shifts if backend == "cpu" else graph.kernel
    return graph.call([add(each) for each in stored])


class _Graph:
    def __init__(self, how: StoredFormat) -> None:
        self.how = how
        self.arrays: list[Array] = []
        self.nodes: list[Node] = []

    def call(self, outputs: list[int]) -> Call:
        """Return everything that was added as one evaluation."""
        return Call(
            # No phase of a run, as that of a load.
            phase="first_chunk",
            tokens=0,
            position=0,
            arrays=tuple(self.arrays),
            nodes=tuple(self.nodes),
            evaluated=tuple(outputs),
            held=tuple(outputs),
        )

    def kernel(self, stored: StoredRows) -> int:
        """Add the kernel of a GPU; return the array it makes."""
        inputs = self._stored(stored)
        return self._node("Quantize", inputs, (stored.rows, stored.width), self.how.dtype)

    def shifts(self, stored: StoredRows) -> int:
        """Add the operations of the CPU, in their order; return the last array."""
        how = self.how
        words, scales, biases = self._stored(stored)
        groups = self.arrays[scales].shape
        shape, each = self.arrays[words].shape, _WORD_BITS // how.bits
        parts = []
        for _ in range(each):
            shifted = words
            for _ in ("left", "right"):
                count = self._node("Broadcast", (self._array((), "U32", "constant"),), shape, "U32")
                shifted = self._node("BitwiseBinary", (shifted, count), shape, "U32")
            parts.append(self._node("ExpandDims", (shifted,), (*shape, 1), "U32", ((-1,),)))
        values = self._node("Concatenate", tuple(parts), (*shape, each), "U32", (len(shape),))
        whole = (*groups, how.group_size)
        values = self._node("Reshape", (values,), whole, "U32")
        values = self._node("AsType", (values,), whole, how.dtype)
        for name, factors in (("Multiply", scales), ("Add", biases)):
            one = self._node("ExpandDims", (factors,), (*groups, 1), how.dtype, ((-1,),))
            wide = self._node("Broadcast", (one,), whole, how.dtype)
            values = self._node(name, (values, wide), whole, how.dtype)
        return self._node("Reshape", (values,), (stored.rows, stored.width), how.dtype)

    def _stored(self, stored: StoredRows) -> tuple[int, int, int]:
        """Add words, scales and biases, which are in use all the time."""
        how = self.how
        groups = ceil_div(stored.width, how.group_size)
        words = groups * how.group_size * how.bits // _WORD_BITS
        return (
            self._array((stored.rows, words), "U32", "weight"),
            self._array((stored.rows, groups), how.dtype, "weight"),
            self._array((stored.rows, groups), how.dtype, "weight"),
        )

    def _array(self, shape: tuple[int, ...], dtype: str, role: Role = "computed") -> int:
        self.arrays.append(Array(shape, dtype, role))
        return len(self.arrays) - 1

    def _node(
        self,
        name: str,
        inputs: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: str,
        arguments: tuple[int | tuple[int, ...], ...] = (),
    ) -> int:
        made = self._array(shape, dtype)
        self.nodes.append(Node(name, inputs, (made,), arguments))
        return made
