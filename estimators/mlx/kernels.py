"""When MLX computes attention in one fused kernel, so that no scores are held in memory."""

from typing import Any

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.data.kernels import KERNELS

# metal::is_nax_available in mlx/backend/metal/device.cpp; phones start one generation later.
_NAX_GENERATION = 17
_NAX_GENERATION_PHONE = 18
# Queries up to which Metal takes its vector kernel, and from which NAX pays at width 256.
_METAL_DECODE_QUERIES = 8
_NAX_QUERIES = 1024
_CUDNN_CAPABILITY = 80
_CUDNN_WIDTH_STEP = 8
_CUDA_VECTOR_QUERIES = 3


def has_nax(device: Device) -> bool:
    """Whether the GPU has neural accelerators that MLX uses (M5 and later, from macOS 26.2 on)."""
    if device.backend != "metal" or device.generation is None:
        return False
    first = _NAX_GENERATION_PHONE if device.gpu_class == "p" else _NAX_GENERATION
    return device.generation >= first


def is_fused(
    *,
    backend: Backend,
    mlx_version: tuple[int, ...],
    nax: bool,
    query_tokens: int,
    key_tokens: int,
    key_dim: int,
    value_dim: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    array_mask: bool,
    kv_quantised: bool,
    compute_capability: int | None = None,
) -> bool:
    """Whether scaled_dot_product_attention holds no scores for these shapes.

    ``mlx_version`` may be cut short: (0, 32) means the newest 0.32 with known rules. Values
    are taken as 16-bit and a CUDA GPU of unknown capability as 8.0 or later: cuDNN needs both.
    Source: mlx/data/kernels.py, each row with its file and version.

    Raises:
        UnsupportedError: when MLX is older than the oldest rules.
    """
    if backend == "cpu" or kv_quantised:
        return False
    row = _row(backend, mlx_version)
    widths = [key_dim, value_dim]
    if causal and query_tokens > key_tokens:
        return False
    if backend == "cuda":
        capable = compute_capability is None or compute_capability >= _CUDNN_CAPABILITY
        return (capable and _cudnn(row, widths, query_tokens)) or (
            widths in row["vector"] and query_tokens <= _CUDA_VECTOR_QUERIES and not array_mask
        )
    if query_tokens > _METAL_DECODE_QUERIES:
        wide = nax and causal and not array_mask and query_tokens >= _NAX_QUERIES
        return widths in row["prefill"] or (wide and widths in row["nax"])
    limit = row["group_limit"]
    in_group = limit is None or query_tokens * (heads // kv_heads) <= limit
    return widths in row["decode"] and query_tokens <= key_tokens and in_group


def _cudnn(row: Any, widths: list[int], query_tokens: int) -> bool:
    # For one query MLX takes cuDNN only when it already chose its vector kernel.
    limit = row["cudnn_width_limit"]
    return query_tokens > 1 and all(w <= limit and w % _CUDNN_WIDTH_STEP == 0 for w in widths)


def _row(backend: Backend, mlx_version: tuple[int, ...]) -> Any:
    """Return the newest row that is not newer than the version, as far as the version goes."""
    rows: list[Any] = KERNELS[backend]
    for row in rows:
        if list(mlx_version) >= row["since"][: len(mlx_version)]:
            return row
    oldest, given = (".".join(map(str, v)) for v in (rows[-1]["since"], mlx_version))
    raise UnsupportedError(
        f"MLX {given}: its attention kernels on {backend} are described from {oldest} on"
    )
