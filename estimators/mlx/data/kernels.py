"""When mx.fast.scaled_dot_product_attention takes one fused kernel, so that no scores exist.

Rows from new to old; a row holds from `since` on, and lists the fields of `kernels.FusedRule`.
Widths are of (key, value). Quantised KV never gets here: mlx_lm/models/base.py computes its scores
with quantized_matmul. The CPU has no fused kernel: mlx/backend/no_gpu/primitives.cpp, use_fallback.

Metal's source is mlx/backend/metal/scaled_dot_product_attention.cpp, has_fused_kernel and
use_fallback, at the tag of each row; after 846d176 (0.32.2) the same functions in libmlx.dylib of
the packages mlx-metal 0.32.3 and 0.32.4.
"""

from typing import Any


def _square(*widths: int) -> tuple[tuple[int, int], ...]:
    return tuple((width, width) for width in widths)


# More queries than these take the full kernel, up to these the vector kernel.
_FULL: dict[str, Any] = {"queries": (9, None)}
_VECTOR: dict[str, Any] = {"queries": (1, 8), "covered": True, "group_limit": 32}
_LONG: dict[str, Any] = {"queries": (1024, None)}

_FULL_0_29: dict[str, Any] = {**_FULL, "widths": _square(64, 80, 128)}
_FULL_0_32_1: dict[str, Any] = {**_FULL, "widths": _square(64, 72, 80, 96, 128)}
_VECTOR_0_30: dict[str, Any] = {**_VECTOR, "widths": _square(64, 96, 128, 256)}
_VECTOR_0_32: dict[str, Any] = {
    **_VECTOR,
    "widths": (*_square(64, 96, 128, 256), (192, 128)),
}
_RULES_0_32_3: tuple[dict[str, Any], ...] = (
    {**_FULL, "widths": (*_square(64, 72, 80, 96, 128), (96, 64))},
    {**_LONG, "widths": _square(256), "nax": True, "masks": ("causal", "array")},
    # Only a first chunk has as many keys as queries (#4505).
    {
        "queries": (2048, None),
        "widths": _square(256),
        "nax": False,
        "masks": ("causal",),
        "same_keys": True,
    },
    # Enough tiles of 32 queries to fill the GPU (#4487).
    {**_LONG, "widths": _square(512), "nax": True, "masks": ("causal",), "least_tiles": 1024},
    {**_VECTOR, "widths": (*_square(64, 96, 128, 256), (192, 128), (96, 64))},
    # MLX_SDPA_D512_MIN_KL (#4459).
    {
        "queries": (1, 1),
        "widths": _square(512),
        "masks": ("causal", "none"),
        "covered": True,
        "group": 8,
        "least_keys": 1024,
    },
)

KERNELS: dict[str, Any] = {
    "metal": [
        {
            "since": (0, 32, 4),
            "source": "mlx-metal 0.32.4, use_fallback and use_blocked_d512",
            "rules": (
                *_RULES_0_32_3,
                # Scores of 256 queries at a time (#4518).
                {**_LONG, "widths": _square(512), "nax": False, "masks": ("causal",), "block": 256},
            ),
        },
        {
            "since": (0, 32, 3),
            "source": "mlx-metal 0.32.3, use_fallback",
            "rules": _RULES_0_32_3,
        },
        {
            "since": (0, 32, 2),
            "source": "846d176, and mlx-metal 0.32.2",
            "rules": (
                _FULL_0_32_1,
                {**_LONG, "widths": _square(256), "nax": True, "masks": ("causal",)},
                _VECTOR_0_32,
            ),
        },
        {"since": (0, 32, 1), "source": "v0.32.1", "rules": (_FULL_0_32_1, _VECTOR_0_32)},
        {"since": (0, 32, 0), "source": "v0.32.0", "rules": (_FULL_0_29, _VECTOR_0_32)},
        {
            "since": (0, 30, 4),
            "source": "v0.30.4, v0.31.0 and v0.31.2",
            "rules": (_FULL_0_29, _VECTOR_0_30),
        },
        {
            "since": (0, 29, 0),
            "source": "v0.29.0, v0.29.4, v0.30.0 and v0.30.3",
            "rules": (_FULL_0_29, {**_VECTOR_0_30, "group_limit": None}),
        },
    ],
    # cuDNN takes widths in multiples of 8 up to 128 and more than one query, from compute capability
    # 8.0 on; for one query MLX takes cuDNN only when it already chose its vector kernel.
    "cuda": [
        {
            "since": (0, 31, 0),
            "source": "mlx/backend/cuda/scaled_dot_product_attention.cpp and .cu, v0.31.0 to 846d176, supports_sdpa_cudnn and supports_sdpa_vector",
            "rules": (
                {"queries": (2, None), "width_step": 8, "width_limit": 128, "capability": 80},
                {"queries": (1, 3), "widths": _square(64, 96, 128), "masks": ("causal", "none")},
            ),
        },
    ],
}
