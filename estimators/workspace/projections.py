"""Matrix products with weights, and what an adapter adds to them."""

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

from memfit.estimators.arch.modules import LowRank
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.mlx.split_products import PART_ITEM_BYTES
from memfit.estimators.workspace.layer_plan import Projection
from memfit.estimators.workspace.tape import Tape

_WORD_BITS = 32
_WORD = 4

# Operations with a stop after each, so that those of other products can come between.
_Steps = Generator[None, None, int]


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
    made, added = list[int](), dict[int, _Steps]()
    for place, projection in enumerate(projections):
        if adapter := projection.low_rank:
            width = max(adapter.width, tape.width)
            sum_ = _Adapted(tape, x, rows, projection, adapter, width, gathers)
            added[place] = sum_.dora() if adapter.rescales else sum_.lora(product)
        made.append(-1 if adapter else product(projection))
    # MLX walks the graph breadth first, so the operations of several products alternate.
    while added:
        for place, steps in tuple(added.items()):
            try:
                next(steps)
            except StopIteration as end:
                made[place] = end.value
                del added[place]
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

    def lora(self, product: Callable[[Projection], int]) -> _Steps:
        """Record mlx-lm tuner/lora.py; return the sum."""
        update = yield from self._update()
        y = product(self.projection)
        yield
        return (yield from self._sum(y, update))

    def dora(self) -> _Steps:
        """Record mlx-lm tuner/dora.py, which makes the adapted matrix in every call."""
        tape, projection, rank = self.tape, self.projection, self.adapter.rank
        cells = projection.inputs * projection.outputs
        scaled = self._wide((), rank * projection.outputs, weight=rank * projection.outputs)
        yield
        dense = yield from self._dequantised(cells)
        matrix = self._wide((scaled,), cells, weight=rank * projection.inputs, counts=ops.MATMUL)
        yield
        base = dense
        if self._promotes:
            base = self._wide((dense,), cells)
            yield
        update = yield from self._update()
        tape.inplace(matrix, base)
        yield
        # mx.linalg.norm: squares, their sums, the root.
        tape.inplace(matrix)
        yield
        norms = self._wide((matrix,), projection.outputs)
        yield
        tape.inplace(norms)
        yield
        shape = (self.rows, projection.inputs, projection.outputs)
        y = _matmul(tape, (self.x, dense), shape)
        yield
        # The magnitudes over the norms.
        tape.inplace(norms, weight=projection.outputs)
        yield
        y = yield from self._sum(y, update)
        return tape.inplace(y, tape.allocate((norms,), projection.outputs))

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

    def _update(self) -> _Steps:
        """Record the product with both matrices of low rank, times the adapter's scale."""
        rows, rank, projection, x = self.rows, self.adapter.rank, self.projection, self.x
        if self._promotes:
            x = self._wide((x,), rows * projection.inputs)
            yield
        weight, inner = rank * projection.inputs, projection.inputs
        if self.gathers:
            low = self._wide((x,), rows * rank, weight=weight, counts=ops.MATMUL)
        else:
            nbytes = rows * rank * self.width
            low = _matmul(self.tape, (x,), (rows, inner, rank), weight=weight, nbytes=nbytes)
        yield
        weight, elements = rank * projection.outputs, rows * projection.outputs
        update = self._wide((low,), elements, weight=weight, counts=ops.MATMUL)
        yield
        self.tape.inplace(update)
        yield
        return update

    def _sum(self, y: int, update: int) -> _Steps:
        if self._promotes:
            update = self.tape.allocate((update,), self.rows * self.projection.outputs)
            yield
        self.tape.inplace(y, update)
        yield
        return y

    def _dequantised(self, cells: int) -> _Steps:
        """Record a packed matrix as a plain one, which a plain one is already."""
        tape, packing, touched = self.tape, self.projection.packing, self.projection.touched
        if packing is None:
            return tape.retain(tape.existing(cells, 0))
        if tape.backend != "cpu":
            dense = tape.allocate((), cells, weight=touched)
            yield
            return dense
        # The CPU has no kernel for it: values become integers of four bytes (mlx ops.cpp,
        # affine_dequantize). Those of floating-point modes take fewer.
        each = _WORD_BITS // packing.bits
        parts = []
        for _ in range(each):
            part = cells // each
            parts.append(tape.allocate((), part, nbytes=part * _WORD, weight=part))
            yield
        for part in parts:
            tape.inplace(part)
            yield
        counts = ops.repeated(each)
        integers = tape.allocate(tuple(parts), cells, nbytes=cells * _WORD, counts=counts)
        yield
        dense = tape.allocate((integers,), cells)
        yield
        # Times the scales, plus the biases.
        for _ in range(2):
            tape.inplace(dense)
            yield
        return dense
