"""What MLX's kernels allocate, and how its allocators round one allocation.

Fused attention holds no scores; Metal's attention of few queries can be in two passes: blocks of
keys have partial results, which are then joined. Products with few results are summed from parts,
which are an array too. Sources: mlx/backend/metal/scaled_dot_product_attention.cpp, eval_gpu and
sdpa_vector_2pass, v0.26.1 to v0.32.1 and 846d176 (0.32.2); libmlx.dylib of mlx-metal 0.32.4 has
the same numbers. quantized.cpp, qmm_splitk and get_qmv_batch_limit; matmul.cpp,
steel_matmul_regular_axpby, steel_gemm_splitk_axpby and steel_gemm_splitk_axpby_nax. The environment
variable MLX_SDPA_BLOCKS, which replaces numbers of blocks, is taken as not set.

Sources of the allocators (mlx 0.32): backend/metal/allocator.cpp, backend/cuda/allocator.cpp,
backend/no_gpu/allocator.cpp.
"""

from functools import cache
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.machine.device import Backend, Device, GpuClass
from memfit.estimators.mlx.data.kernels import KERNELS
from memfit.estimators.mlx.versions import MlxVersions, Version, format_version

PAGE = 16384
_CUDA_SMALLEST = 8


KEPT_BYTES: dict[Backend, int | None] = {"cpu": 32 << 20, "metal": None, "cuda": None}
"""The most bytes of freed buffers that an allocator keeps for reuse; None: all, in effect."""


def allocated(nbytes: int, backend: Backend = "metal") -> int:
    """Return the bytes one allocation takes.

    >>> allocated(16384), allocated(16385), allocated(9, "cuda"), allocated(16385, "cpu")
    (16384, 32768, 16, 16385)
    """
    if backend == "cpu" or nbytes == 0:
        return nbytes
    if nbytes > PAGE:
        return round_up(nbytes, PAGE)
    if backend == "metal":
        return nbytes
    return max(_CUDA_SMALLEST, 1 << (nbytes - 1).bit_length())


# metal::is_nax_available in mlx/backend/metal/device.cpp; phones start one generation later.
_NAX_GENERATION = 17
_NAX_GENERATION_PHONE = 18
_TILE_QUERIES = 32

Mask = Literal["causal", "array", "none"]


def has_nax(device: Device) -> bool:
    """Whether the GPU has neural accelerators that MLX uses (M5 and later, from macOS 26.2 on)."""
    if device.backend != "metal" or device.generation is None:
        return False
    first = _NAX_GENERATION_PHONE if device.gpu_class == "p" else _NAX_GENERATION
    return device.generation >= first


class AttentionCall(Struct, frozen=True, kw_only=True):
    """The shapes of one call of scaled_dot_product_attention on a device."""

    backend: Backend
    nax: bool
    """Whether the GPU has neural accelerators."""
    query_tokens: int
    key_tokens: int
    key_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    mask: Mask
    batch: int = 1
    compute_capability: int | None = None
    """Of a CUDA GPU, 80 for 8.0; unknown is taken as enough."""


class FusedRule(Struct, frozen=True, kw_only=True):
    """One kernel of MLX, and the calls that it takes; what is not set does not matter."""

    queries: tuple[int, int | None]
    """The fewest and the most."""
    widths: tuple[tuple[int, int], ...] = ()
    """Of keys and values."""
    width_step: int = 0
    """In place of ``widths``: any multiple of it up to ``width_limit``."""
    width_limit: int = 0
    nax: bool | None = None
    masks: tuple[Mask, ...] = ("causal", "array", "none")
    covered: bool = False
    """Whether there must be as many keys as queries or more; a causal mask needs them anyway."""
    same_keys: bool = False
    """Whether there must be as many keys as queries."""
    least_keys: int = 0
    group: int | None = None
    """Heads that share keys and values."""
    group_limit: int | None = None
    """The most queries times heads that share keys and values."""
    least_tiles: int = 0
    """Tiles of 32 queries of all heads."""
    capability: int = 0
    block: int = 0
    """Queries for which scores are held at once; 0: for none."""

    def takes(self, call: AttentionCall) -> bool:
        """Whether the kernel takes a call."""
        least, most = self.queries
        return (
            call.query_tokens >= least
            and (most is None or call.query_tokens <= most)
            and self.has_widths(call.key_dim, call.value_dim)
            and self.nax in (None, call.nax)
            and call.mask in self.masks
            and self._fits_keys(call)
            and self._fits_heads(call)
            and (call.compute_capability or self.capability) >= self.capability
        )

    def scratch_row(self, keys: int, width: int) -> int:
        """Return the elements it holds for each query of a block: scores, the query, its result.

        Source: libmlx.dylib of mlx-metal 0.32.4, sdpa_full_self_attention_blocked.
        """
        return keys + 2 * width if self.block else 0

    def has_widths(self, key_dim: int, value_dim: int) -> bool:
        """Whether it is made for these widths."""
        if not self.width_step:
            return (key_dim, value_dim) in self.widths
        return all(w <= self.width_limit and not w % self.width_step for w in (key_dim, value_dim))

    def _fits_keys(self, call: AttentionCall) -> bool:
        queries, keys = call.query_tokens, call.key_tokens
        if (self.covered or call.mask == "causal") and queries > keys:
            return False
        return keys >= self.least_keys and (not self.same_keys or queries == keys)

    def _fits_heads(self, call: AttentionCall) -> bool:
        group = call.heads // call.kv_heads
        tiles = call.batch * call.heads * ceil_div(call.query_tokens, _TILE_QUERIES)
        return (
            (self.group is None or group == self.group)
            and (self.group_limit is None or call.query_tokens * group <= self.group_limit)
            and tiles >= self.least_tiles
        )


def fused_kernel(call: AttentionCall, mlx: Version) -> FusedRule | None:
    """Return the fused kernel that a version of MLX takes, None where it holds all scores.

    Values are taken as 16-bit, which cuDNN needs. Source: mlx/data/kernels.py, each row with its
    file and version.

    Raises:
        UnsupportedError: when MLX is older than the oldest rules.
    """
    if call.backend == "cpu":
        return None
    return next((rule for rule in _rules(call.backend, mlx) if rule.takes(call)), None)


def fused_changes(widths: frozenset[tuple[int, int]], device: Device) -> tuple[Version, ...]:
    """Return the versions of MLX, oldest first, from which on other kernels take these widths."""
    versions: list[Version] = []
    before = None
    for row in reversed(KERNELS.get(device.backend, [])):
        result = _concerned(_made(device.backend, row["since"]), widths, has_nax(device))
        if result != before:
            versions.append(row["since"])
        before = result
    return tuple(versions)


def _concerned(
    rules: tuple[FusedRule, ...], widths: frozenset[tuple[int, int]], nax: bool
) -> frozenset[FusedRule]:
    """The rules for some of the widths on a GPU, without those for others."""
    result = (
        replace(rule, widths=tuple(pair for pair in rule.widths if pair in widths))
        for rule in rules
        if rule.nax in (None, nax)
    )
    return frozenset(rule for rule in result if rule.widths or rule.width_step)


def _rules(backend: Backend, mlx: Version) -> tuple[FusedRule, ...]:
    """Return those of the newest row that is not newer than the version."""
    rows: list[Any] = KERNELS[backend]
    for row in rows:
        if mlx >= row["since"]:
            return _made(backend, row["since"])
    raise UnsupportedError(
        f"MLX {format_version(mlx)}: its attention kernels on {backend} are described from"
        f" {format_version(rows[-1]['since'])} on"
    )


@cache
def _made(backend: Backend, since: Version) -> tuple[FusedRule, ...]:
    row = next(row for row in KERNELS[backend] if row["since"] == since)
    return tuple(FusedRule(**rule) for rule in row["rules"])


VECTOR_QUERIES = 8
"""Up to this many queries Metal takes its vector kernels."""
SECOND_PASS_KERNELS = 1
_FLOAT32 = 4
# Keys from which on large GPUs take two passes, and others where heads share keys and values.
_LARGE_GPU_KEYS = 1024
_SHARED_KEYS = 4096
_FIXED_BLOCKS = 32
# Class s: the blocks of calls with up to these keys, and of longer ones.
_BLOCKS_BY_KEYS = ((8192, 128), (32768, 256), (65536, 512))
_MOST_BLOCKS = 1024


class VectorCall(NamedTuple):
    """Attention of up to ``VECTOR_QUERIES`` queries."""

    rows: int
    """Queries of all heads and sequences."""
    queries: int
    """Of one head."""
    keys: int
    group: int
    """Query heads for each head of keys."""
    value_dim: int
    item_bytes: int


class VectorAttention(NamedTuple):
    """Which calls a GPU computes in two passes, and what is alive between them."""

    gpu_class: GpuClass | None = None
    """None for a backend without these kernels."""
    blocks_by_call: bool = True
    """Whether GPU and call decide the number of blocks, and results have the queries' type."""

    def partial_results(self, call: VectorCall) -> tuple[tuple[int, int], ...]:
        """Return the elements and item bytes of the arrays between the passes, none for one pass.

        >>> call = VectorCall(32, 1, 4096, group=4, value_dim=128, item_bytes=2)
        >>> VectorAttention("g").partial_results(call)
        ((262144, 2), (2048, 4), (2048, 4))
        >>> VectorAttention("g").partial_results(call._replace(group=1))
        ()
        """
        if call.queries > VECTOR_QUERIES or not self.may_take_two_passes(call.keys, call.group):
            return ()
        blocks = call.rows * self._blocks(call)
        item_bytes = call.item_bytes if self.blocks_by_call else _FLOAT32
        return (blocks * call.value_dim, item_bytes), (blocks, _FLOAT32), (blocks, _FLOAT32)

    def partial_bytes(self, call: VectorCall) -> int:
        """Return what the allocator takes for these arrays."""
        return sum(allocated(count * width) for count, width in self.partial_results(call))

    def may_take_two_passes(self, keys: int, group: int | None = None) -> bool:
        """Whether it does so for this many keys; without a ``group``, whether it does for any."""
        if self.gpu_class is None:
            return False
        is_large = self.gpu_class in (("d", "s") if self.blocks_by_call else ("d",))
        return keys >= (_LARGE_GPU_KEYS if is_large else _SHARED_KEYS) and (is_large or group != 1)

    def _blocks(self, call: VectorCall) -> int:
        if not self.blocks_by_call:
            return _FIXED_BLOCKS
        keys, rows = call.keys, call.group * call.queries
        if self.gpu_class == "s":
            if keys <= _LARGE_GPU_KEYS or rows <= 4:
                return 64
            return next((blocks for most, blocks in _BLOCKS_BY_KEYS if keys <= most), _MOST_BLOCKS)
        if self.gpu_class == "d":
            if rows <= 2:
                return 256 if keys > 8192 else 128
            if rows < 6 or keys < 16384:
                return 128
            return 512 if keys < 65536 else _MOST_BLOCKS
        return 64 if rows >= 4 else 32


def vector_attention(device: Device, versions: MlxVersions) -> VectorAttention:
    """Return the rules of a device and a version of MLX."""
    if device.backend != "metal":
        return VectorAttention()
    # A GPU without a known class is in MLX's last branch, as class g.
    return VectorAttention(device.gpu_class or "g", versions.has("blocks_of_two_pass_attention"))


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
