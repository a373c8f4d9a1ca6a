"""Operations that are one kernel on a GPU and a chain on the CPU (mlx fast.cpp, fallbacks)."""

from memfit.estimators.workspace.tape import Tape

FLOAT32 = 4


def norm(tape: Tape, x: int, elements: int, *, shared: bool) -> int:
    """RMSNorm or LayerNorm of an array; ``shared`` says that others read it too."""
    if tape.backend != "cpu":
        return tape.new((x,), elements) if shared else tape.over(x)
    wide = elements * FLOAT32
    casted = x if tape.width == FLOAT32 else tape.new((x,), elements, nbytes=wide)
    squared = tape.new((casted,), elements, nbytes=wide)
    mean = tape.new((squared,), 1, kernels=2, views=2)
    for _ in range(3):
        tape.over(mean, views=1)
    scaled = tape.new((casted, mean), elements, nbytes=wide)
    if tape.width != FLOAT32:
        scaled = tape.new((scaled,), elements)
    return tape.over(scaled, views=1)


def rope(tape: Tape, x: int, elements: int, *, rows: int, dim: int) -> int:
    """Rotary embedding of heads that lie transposed, so that the result is a new array."""
    if tape.backend != "cpu":
        return tape.new((x,), elements)
    angles = rows * dim // 2
    positions = tape.new((), rows, nbytes=rows * FLOAT32, kernels=5, views=5)
    theta = tape.new((positions,), angles, nbytes=angles * FLOAT32, kernels=5, views=6)
    tables = []
    for _ in ("cos", "sin"):
        table = tape.new((theta,), angles, nbytes=angles * FLOAT32)
        tables.append(tape.new((table,), angles) if tape.width != FLOAT32 else table)
    cosines, sines = tables
    halves = []
    for first, second in ((cosines, sines), (sines, cosines)):
        half = tape.new((x, first), elements // 2, views=3)
        other = tape.new((x, second), elements // 2, views=2)
        halves.append(tape.over(half, other))
    return tape.new((*halves, x), elements, kernels=2, views=2)
