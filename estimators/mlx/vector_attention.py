"""Metal's attention of few queries in two passes: blocks of keys have partial results, then joined.

Source: mlx/backend/metal/scaled_dot_product_attention.cpp, eval_gpu and sdpa_vector_2pass, v0.26.1
to v0.32.1 and 846d176 (0.32.2); libmlx.dylib of mlx-metal 0.32.4 has the same numbers. The
environment variable MLX_SDPA_BLOCKS, which replaces them, is taken as not set.
"""

from typing import NamedTuple

from memfit.estimators.machine.device import Device, GpuClass
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.versions import MlxVersions

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
