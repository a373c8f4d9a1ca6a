"""Matrix products with weights, and what an adapter adds to them."""

from memfit.estimators.arch.modules import LowRank
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.mlx.split_products import parts_of_product
from memfit.estimators.workspace.layer_plan import Projection
from memfit.estimators.workspace.tape import Tape


def project(
    tape: Tape,
    x: int,
    projection: Projection,
    rows: int,
    *,
    counts: ops.OperationCount | None = None,
) -> int:
    """A matrix product with a weight, plain or packed, and its adapter."""
    counts, elements, temporary = counts or projection.counts, rows * projection.outputs, 0
    if tape.splits_products and projection.group_size:
        parts = parts_of_product(rows, projection.inputs, projection.outputs, projection.group_size)
        if parts > 1:
            temporary = parts * elements
            counts = counts._replace(kernels=counts.kernels + 1)
    y = tape.allocate(
        (x,),
        elements,
        weight=projection.touched + temporary,
        counts=counts,
        temporary=temporary * tape.width,
    )
    return adapted(tape, x, y, projection, rows)


def adapted(tape: Tape, x: int, y: int, projection: Projection, rows: int) -> int:
    """The product ``y`` of ``x`` with what an adapter adds (mlx-lm tuner/lora.py, dora.py)."""
    adapter = projection.low_rank
    if adapter is None:
        return y
    inputs, outputs, rank = projection.inputs, rows * projection.outputs, adapter.rank
    width = max(adapter.width, tape.width)
    # Adapters are trained in float32, and their product promotes the activations.
    promoted = width > tape.width
    if promoted:
        x = tape.allocate((x,), rows * inputs, nbytes=rows * inputs * width)
    low = tape.allocate(
        (x,), rows * rank, nbytes=rows * rank * width, weight=inputs * rank, counts=ops.MATMUL
    )
    weight = rank * projection.outputs
    update = tape.allocate(
        (low,), outputs, nbytes=outputs * width, weight=weight, counts=ops.MATMUL
    )
    # Times the adapter's scale, then cast back.
    tape.inplace(update)
    if promoted:
        update = tape.allocate((update,), outputs)
    tape.inplace(y, update)
    if adapter.rescales:
        tape.inplace(y, _magnitudes(tape, projection, adapter, width))
    return y


def _magnitudes(tape: Tape, projection: Projection, adapter: LowRank, width: int) -> int:
    """Norms of the adapted matrix, which DoRA computes in every call (mlx-lm tuner/dora.py)."""
    outputs = projection.outputs
    cells, table = projection.inputs * outputs, outputs * adapter.rank
    scaled = tape.allocate((), table, nbytes=table * width)
    matrix = tape.allocate((scaled,), cells, nbytes=cells * width, counts=ops.MATMUL)
    base: tuple[int, ...] = ()
    if projection.group_size:
        base = (tape.allocate((), cells, weight=projection.touched),)
    if width > tape.width:
        base = (tape.allocate(base, cells, nbytes=cells * width, weight=projection.touched),)
    tape.inplace(matrix, *base)
    # mx.linalg.norm: squares, their sums, the root.
    tape.inplace(matrix)
    norms = tape.allocate((matrix,), outputs, nbytes=outputs * width)
    tape.inplace(norms)
    tape.inplace(norms)
    return tape.allocate((norms,), outputs)
