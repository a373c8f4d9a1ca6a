"""When mx.fast.scaled_dot_product_attention takes one fused kernel, so that no scores exist.

Rows from new to old; a row holds from `since` on. Widths are [key, value] pairs.
Quantised KV never gets here: mlx_lm/models/base.py computes its scores with quantized_matmul.
The CPU has no fused kernel: mlx/backend/no_gpu/primitives.cpp, use_fallback.
"""

from typing import Any

KERNELS: dict[str, Any] = {
    "metal": [
        # prefill: more than 8 queries. decode: at most 8, and queries x heads / kv_heads <= group_limit.
        # nax: prefill of at least 1024 queries, causal, no array mask, on an M5 class GPU.
        {
            "since": [0, 32, 2],
            "source": "mlx/backend/metal/scaled_dot_product_attention.cpp at 846d176, has_fused_kernel and use_fallback",
            "prefill": [[64, 64], [72, 72], [80, 80], [96, 96], [128, 128]],
            "nax": [[256, 256]],
            "decode": [[64, 64], [96, 96], [128, 128], [256, 256], [192, 128]],
            "group_limit": 32,
        },
        {
            "since": [0, 32, 1],
            "source": "the same file at v0.32.1, use_fallback",
            "prefill": [[64, 64], [72, 72], [80, 80], [96, 96], [128, 128]],
            "nax": [],
            "decode": [[64, 64], [96, 96], [128, 128], [256, 256], [192, 128]],
            "group_limit": 32,
        },
        {
            "since": [0, 32, 0],
            "source": "the same file at v0.32.0, use_fallback",
            "prefill": [[64, 64], [80, 80], [128, 128]],
            "nax": [],
            "decode": [[64, 64], [96, 96], [128, 128], [256, 256], [192, 128]],
            "group_limit": 32,
        },
        {
            "since": [0, 30, 4],
            "source": "the same file at v0.30.4, v0.31.0 and v0.31.2, use_fallback",
            "prefill": [[64, 64], [80, 80], [128, 128]],
            "nax": [],
            "decode": [[64, 64], [96, 96], [128, 128], [256, 256]],
            "group_limit": 32,
        },
        {
            "since": [0, 29, 0],
            "source": "the same file at v0.29.0, v0.29.4, v0.30.0 and v0.30.3, use_fallback",
            "prefill": [[64, 64], [80, 80], [128, 128]],
            "nax": [],
            "decode": [[64, 64], [96, 96], [128, 128], [256, 256]],
            "group_limit": None,
        },
    ],
    "cuda": [
        # cuDNN: compute capability 8.0, 16-bit values, widths in multiples of 8 up to the limit, more
        # than one query. The vector kernel: fewer than 4 queries, equal widths, no array mask.
        {
            "since": [0, 31, 0],
            "source": "mlx/backend/cuda/scaled_dot_product_attention.cpp and .cu, v0.31.0 to 846d176, supports_sdpa_cudnn and supports_sdpa_vector",
            "cudnn_width_limit": 128,
            "vector": [[64, 64], [96, 96], [128, 128]],
        },
    ],
}
