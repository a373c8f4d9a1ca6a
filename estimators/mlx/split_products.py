"""Products that Metal sums from parts, because their results are few: the parts are an array too.

Sources: mlx/backend/metal/quantized.cpp, qmm_splitk and get_qmv_batch_limit; matmul.cpp,
steel_matmul_regular_axpby, steel_gemm_splitk_axpby and steel_gemm_splitk_axpby_nax.
"""

from typing import NamedTuple

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions

PART_ITEM_BYTES = 4
"""Parts of a product with a plain weight are float32, those with a packed one as its results."""
# Packed: the parts make about this many blocks of 32 x 32 results.
_BLOCKS = 512
_SIDE = 32
# Fewer rows take a vector kernel; MLX's limit is 6 to 33 by GPU and shape.
_FEWEST_ROWS = 6
# Plain: tiles of 16 x 16 results up to which the inner axis is split, on large and on small GPUs.
_TILE = 16
_MOST_TILES = {"s": 2048, "d": 2048}
_MOST_TILES_OTHERS = 1024
_MOST_PARTS = 32
# With neural accelerators: inner axes up to a length, and that of a part; 0 is half of the axis.
_NAX_PARTS = ((1024, 0), (2048, 1024), (4096, 2048))
_NAX_PART = 4096


class SplitProducts(NamedTuple):
    """Of how many parts a device sums a product; each part is a temporary array of all results."""

    most_tiles: int = 0
    nax: bool = False
    nax_splits: bool = False
    packed_splits: bool = False

    def packed(self, rows: int, inner: int, columns: int, group_size: int) -> int:
        """Return the parts of a product with a packed weight.

        >>> rules = SplitProducts(packed_splits=True)
        >>> rules.packed(127, 1536, 256, 64), rules.packed(2047, 2560, 9728, 64)
        (12, 1)
        """
        if not self.packed_splits or rows < _FEWEST_ROWS:
            return 1
        unit = max(group_size, _SIDE)
        most = min(_BLOCKS // (ceil_div(rows, _SIDE) * ceil_div(columns, _SIDE)), inner // unit)
        return next((n for n in range(most, 1, -1) if inner % (n * unit) == 0), 1)

    def plain(self, rows: int, inner: int, columns: int) -> int:
        """Return the parts of a product with a plain weight.

        >>> rules = SplitProducts(most_tiles=2048)
        >>> rules.plain(64, 4096, 64), rules.plain(64, 4096, 4096), rules.plain(2047, 4096, 4096)
        (32, 2, 1)
        """
        longer = max(rows, columns)
        if not self.most_tiles or min(rows, columns) == 1:
            return 1
        if self.nax:
            is_long = inner >= 3 * longer or (longer <= 1024 and inner > 2 * longer)
            if not (self.nax_splits and is_long):
                return 1
            part = next((size for most, size in _NAX_PARTS if inner <= most), _NAX_PART)
            return ceil_div(inner, part or inner // 2)
        tiles = ceil_div(rows, _TILE) * ceil_div(columns, _TILE)
        # Few tiles would leave most of the GPU idle, so parts of the inner axis run side by side.
        if tiles > self.most_tiles or inner // _TILE < 8 or inner < longer:
            return 1
        blocks = ceil_div(rows, _SIDE) * ceil_div(columns, _SIDE)
        return min(max(2, _next_power_of_2(inner // _TILE // blocks)), _MOST_PARTS)


def split_products(device: Device, versions: MlxVersions) -> SplitProducts:
    """Return the rules of a device and a version of MLX."""
    if device.backend != "metal":
        return SplitProducts()
    return SplitProducts(
        _MOST_TILES.get(device.gpu_class or "", _MOST_TILES_OTHERS),
        has_nax(device),
        versions.has("nax_split_k"),
        versions.has("quantized_split_k"),
    )


def _next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
