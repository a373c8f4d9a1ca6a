"""Operations that are one kernel on a GPU and a chain on the CPU (mlx fast.cpp, fallbacks)."""

from memfit.estimators.workspace.tape import Tape

FLOAT32 = 4


def norm(tape: Tape, x: int, elements: int, *, shared: bool) -> int:
    """RMSNorm or LayerNorm of an array; ``shared`` says that others read it too."""
    if tape.backend != "cpu":
        return tape.allocate((x,), elements) if shared else tape.inplace(x)
    wide = elements * FLOAT32
    casted = x if tape.width == FLOAT32 else tape.allocate((x,), elements, nbytes=wide)
    squared = tape.allocate((casted,), elements, nbytes=wide)
    mean = tape.allocate((squared,), 1, kernels=2, views=2)
    for _ in range(3):
        tape.inplace(mean, views=1)
    scaled = tape.allocate((casted, mean), elements, nbytes=wide)
    if tape.width != FLOAT32:
        scaled = tape.allocate((scaled,), elements)
    return tape.inplace(scaled, views=1)


def rope(tape: Tape, x: int, elements: int, *, rows: int, dim: int) -> int:
    """Rotary embedding of heads that lie transposed, so that the result is a new array."""
    if tape.backend != "cpu":
        return tape.allocate((x,), elements)
    angles = rows * dim // 2
    positions = tape.allocate((), rows, nbytes=rows * FLOAT32, kernels=5, views=5)
    theta = tape.allocate((positions,), angles, nbytes=angles * FLOAT32, kernels=5, views=6)
    tables = []
    for _ in ("cos", "sin"):
        table = tape.allocate((theta,), angles, nbytes=angles * FLOAT32)
        tables.append(tape.allocate((table,), angles) if tape.width != FLOAT32 else table)
    cosines, sines = tables
    halves = []
    for first, second in ((cosines, sines), (sines, cosines)):
        half = tape.allocate((x, first), elements // 2, views=3)
        other = tape.allocate((x, second), elements // 2, views=2)
        halves.append(tape.inplace(half, other))
    return tape.allocate((*halves, x), elements, kernels=2, views=2)
