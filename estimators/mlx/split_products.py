"""Products with packed weights that Metal sums from parts, because their results are few.

Source: mlx/backend/metal/quantized.cpp, qmm_splitk and get_qmv_batch_limit.
"""

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.versions import MlxVersions

# The parts make about so many blocks of 32 x 32 results.
_BLOCKS = 512
_SIDE = 32
# Fewer rows take a vector kernel; MLX's limit is 6 to 33 by GPU and shape.
_FEWEST_ROWS = 6


def splits_products(backend: Backend, versions: MlxVersions) -> bool:
    """Whether this MLX splits them."""
    return backend == "metal" and versions.has("quantized_split_k")


def parts_of_product(rows: int, inner: int, columns: int, group_size: int) -> int:
    """Return of how many parts a product is summed; each is a temporary array of all results.

    >>> parts_of_product(127, 1536, 256, 64), parts_of_product(2047, 2560, 9728, 64)
    (12, 1)
    """
    if rows < _FEWEST_ROWS:
        return 1
    unit = max(group_size, _SIDE)
    most = min(_BLOCKS // (ceil_div(rows, _SIDE) * ceil_div(columns, _SIDE)), inner // unit)
    return next((n for n in range(most, 1, -1) if inner % (n * unit) == 0), 1)
