"""Matrix products with weights, norms and rotary embeddings: what all layers put on a tape."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from memfit.estimators.arch.model import LowRank
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.mlx.kernels import PART_ITEM_BYTES
from memfit.estimators.workspace.prepared import Projection
from memfit.estimators.workspace.tape import Tape

_WORD_BITS = 32
_WORD = 4


def project(
    tape: Tape,
    x: int,
    projection: Projection,
    rows: int,
    *,
    counts: ops.OperationCount | None = None,
) -> int:
    """A matrix product with a weight, plain or packed, and its adapter."""
    (made,) = project_each(tape, x, (projection,), rows, counts=counts)
    return made


def project_each(
    tape: Tape,
    x: int,
    projections: Iterable[Projection],
    rows: int,
    *,
    counts: ops.OperationCount | None = None,
) -> list[int]:
    """Products of one input with several weights, and their adapters."""

    def product(projection: Projection) -> int:
        return _product(tape, x, projection, rows, counts or projection.counts)

    return adapted_each(tape, x, projections, rows, product)


def adapted_each(
    tape: Tape,
    x: int,
    projections: Iterable[Projection],
    rows: int,
    product: Callable[[Projection], int],
    *,
    gathers: bool = False,
) -> list[int]:
    """Each ``product`` of one input, with what an adapter adds to it; experts are gathered."""
    made, added = list[int](), dict[int, Callable[[], int]]()
    for place, projection in enumerate(projections):
        if adapter := projection.low_rank:
            width = max(adapter.width, tape.width)
            sum_ = _Adapted(tape, x, rows, projection, adapter, width, gathers)
            added[place] = sum_.dora if adapter.rescales else partial(sum_.lora, product)
        made.append(-1 if adapter else product(projection))
    for place, array in zip(added, tape.alternate(added.values()), strict=True):
        made[place] = array
    return made


def _product(
    tape: Tape, x: int, projection: Projection, rows: int, counts: ops.OperationCount
) -> int:
    shape, packing = (rows, projection.inputs, projection.outputs), projection.packing
    made = _matmul(tape, (x,), shape, packing, weight=projection.touched, counts=counts)
    # The kernel of a plain product adds the bias itself (mlx nn/layers/linear.py, addmm).
    return tape.inplace(made) if packing and projection.has_bias else made


def _matmul(
    tape: Tape,
    inputs: tuple[int, ...],
    shape: tuple[int, int, int],
    packing: Quantization | None = None,
    *,
    weight: int = 0,
    counts: ops.OperationCount = ops.MATMUL,
    nbytes: int | None = None,
) -> int:
    """Record a product of rows, inner axis and columns, and the parts that it is summed from."""
    rows, _, columns = shape
    if packing:
        parts, item_bytes = tape.splits.packed(*shape, packing.group_size), tape.width
    else:
        parts, item_bytes = tape.splits.plain(*shape), PART_ITEM_BYTES
    split = parts * rows * columns if parts > 1 else 0
    if split:
        counts = counts._replace(kernels=counts.kernels + 1)
    return tape.allocate(
        inputs,
        rows * columns,
        nbytes=nbytes,
        weight=weight + split,
        counts=counts,
        temporary=split * item_bytes,
    )


class _Adapted(NamedTuple):
    """A product and what an adapter adds to it, in the order of MLX."""

    tape: Tape
    x: int
    rows: int
    projection: Projection
    adapter: LowRank
    width: int
    """Bytes of an element of the adapter's products: it is trained in float32."""
    gathers: bool
    """Whether rows choose their matrices, in products that are never split."""

    def lora(self, product: Callable[[Projection], int]) -> int:
        """Record mlx-lm tuner/lora.py; return the sum."""
        update = self._scaled(self._update(self._low()))
        return self._sum(product(self.projection), update)

    def dora(self) -> int:
        """Record mlx-lm tuner/dora.py, which makes the adapted matrix in every call.

        What needs no activations is as deep in the graph as the products of low rank, and runs
        with them.
        """
        tape, projection, rank = self.tape, self.projection, self.adapter.rank
        cells = projection.inputs * projection.outputs
        factor, scale = rank * projection.outputs, ops.SCALED_FACTOR
        scaled = self._wide((), factor, weight=factor, counts=scale)
        dense = self._dequantised(cells)
        weight = rank * projection.inputs
        matrix = self._wide((scaled,), cells, weight=weight, counts=ops.MATRIX_PRODUCT)
        base = self._wide((dense,), cells) if self._promotes else dense
        low = self._low()
        tape.inplace(matrix, base)
        # mx.linalg.norm: squares, their sums, the root.
        tape.inplace(matrix)
        norms = self._wide((matrix,), projection.outputs, counts=ops.ROW_SUMS)
        update = self._update(low)
        tape.inplace(norms)
        update = self._scaled(update)
        y = _matmul(tape, (self.x, dense), (self.rows, projection.inputs, projection.outputs))
        # The magnitudes over the norms.
        tape.inplace(norms, weight=projection.outputs)
        y = self._sum(y, update)
        factors = tape.allocate((norms,), projection.outputs)
        return tape.inplace(y, factors, counts=ops.BROADCAST_PRODUCT)

    @property
    def _promotes(self) -> bool:
        return self.width > self.tape.width

    def _wide(
        self,
        inputs: tuple[int, ...],
        elements: int,
        *,
        weight: int = 0,
        counts: ops.OperationCount = ops.ELEMENTWISE,
    ) -> int:
        nbytes = elements * self.width
        return self.tape.allocate(inputs, elements, nbytes=nbytes, weight=weight, counts=counts)

    def _low(self) -> int:
        """Record the product with the first matrix of low rank."""
        rows, rank, inputs, x = self.rows, self.adapter.rank, self.projection.inputs, self.x
        counts = ops.LOW_RANK_PRODUCT
        if self._promotes:
            x = self._wide((x,), rows * inputs)
        weight = rank * inputs
        if self.gathers:
            return self._wide((x,), rows * rank, weight=weight, counts=counts)
        shape, nbytes = (rows, inputs, rank), rows * rank * self.width
        return _matmul(self.tape, (x,), shape, weight=weight, nbytes=nbytes, counts=counts)

    def _update(self, low: int) -> int:
        """Record the product with the second one."""
        outputs = self.projection.outputs
        weight, counts = self.adapter.rank * outputs, ops.LOW_RANK_PRODUCT
        return self._wide((low,), self.rows * outputs, weight=weight, counts=counts)

    def _scaled(self, update: int) -> int:
        return self.tape.inplace(update, counts=ops.SCALED_UPDATE)

    def _sum(self, y: int, update: int) -> int:
        if self._promotes:
            update = self.tape.allocate((update,), self.rows * self.projection.outputs)
        return self.tape.inplace(y, update)

    def _dequantised(self, cells: int) -> int:
        """Record a packed matrix as a plain one, which a plain one is already."""
        tape, packing, touched = self.tape, self.projection.packing, self.projection.touched
        if packing is None:
            return tape.retain(tape.existing(cells, 0))
        if tape.backend != "cpu":
            return tape.allocate((), cells, weight=touched)
        # The CPU has no kernel for it: values become integers of four bytes (mlx ops.cpp,
        # affine_dequantize). Those of floating-point modes take fewer.
        each = _WORD_BITS // packing.bits
        part = cells // each
        parts = [
            tape.allocate((), part, nbytes=part * _WORD, weight=part, counts=ops.SHIFTED_LEFT)
            for _ in range(each)
        ]
        for shifted in parts:
            tape.inplace(shifted, counts=ops.SHIFTED_RIGHT)
        counts = ops.repeated(each)
        integers = tape.allocate(tuple(parts), cells, nbytes=cells * _WORD, counts=counts)
        dense = tape.allocate((integers,), cells, counts=ops.CAST_VALUES)
        # Times the scales, plus the biases.
        tape.inplace(dense, counts=ops.SCALED_VALUES)
        return tape.inplace(dense, counts=ops.BIASED_VALUES)


FLOAT32 = 4


def norm(tape: Tape, x: int, elements: int, *, shared: bool) -> int:
    """RMSNorm or LayerNorm of an array; ``shared`` says that others read it too."""
    if tape.backend != "cpu":
        # The kernel writes over its input when it may (mlx backend/metal/normalization.cpp).
        return tape.allocate((x,), elements, is_part=True) if shared else tape.inplace(x)
    # The CPU has no kernel; the fallback casts its input to float32 and the result back.
    wide = elements * FLOAT32
    # mx.astype returns an array that has the type already.
    casted = x if tape.width == FLOAT32 else tape.allocate((x,), elements, nbytes=wide)
    squared = tape.allocate((casted,), elements, nbytes=wide)
    mean = tape.allocate((squared,), 1, counts=ops.NORM_MEAN)
    for _ in range(3):
        tape.inplace(mean, counts=ops.NORM_SCALAR)
    scaled = tape.allocate((casted, mean), elements, nbytes=wide)
    if tape.width != FLOAT32:
        scaled = tape.allocate((scaled,), elements)
    return tape.inplace(scaled, counts=ops.NORM_WEIGHT)


def rope(tape: Tape, x: int, elements: int, *, rows: int, dim: int) -> int:
    """Rotary embedding of transposed heads, so that the result is a new array."""
    if tape.backend != "cpu":
        # Only an input in rows without gaps can be written over (backend/metal/rope.cpp).
        return tape.allocate((x,), elements, is_part=True)
    angles = rows * dim // 2
    # Every layer computes its own tables of cosines and sines, in float32.
    positions = tape.allocate((), rows, nbytes=rows * FLOAT32, counts=ops.ROPE_POSITIONS)
    theta = tape.allocate((positions,), angles, nbytes=angles * FLOAT32, counts=ops.ROPE_ANGLES)
    tables = []
    for _ in ("cos", "sin"):
        table = tape.allocate((theta,), angles, nbytes=angles * FLOAT32)
        # The tables are cast to the type of the heads before the products.
        tables.append(tape.allocate((table,), angles) if tape.width != FLOAT32 else table)
    cosines, sines = tables
    # x1 * cos - x2 * sin and x1 * sin + x2 * cos, the two halves of each head.
    halves = []
    for first, second in ((cosines, sines), (sines, cosines)):
        half = tape.allocate((x, first), elements // 2, counts=ops.ROPE_FIRST_PRODUCT)
        other = tape.allocate((x, second), elements // 2, counts=ops.ROPE_SECOND_PRODUCT)
        halves.append(tape.inplace(half, other))
    return tape.allocate((*halves, x), elements, counts=ops.ROPE_JOINED)
