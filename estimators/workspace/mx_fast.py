"""What is one kernel on a GPU and a chain on the CPU (mlx fast.cpp, fallbacks)."""

from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.tape import Tape

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
