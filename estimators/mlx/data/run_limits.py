"""What ends a run on MLX though its bytes fit: one row for each limit that was seen or measured.

docs/accuracy.md has the same table for people.
"""

from typing import Any

# macOS ends the process with kIOGPUCommandBufferCallbackErrorImpactingInteractivity. No limit in
# seconds separates the runs that were killed from those that were not; the keys of the longest
# prefill call do: on M2 Ultra 65,536 passed and 131,072 were killed, on M2 Max the first was killed
# between 90,000 and 104,000. M1 has the same bfloat16 emulation and slower GPUs; on M3 to M5 runs
# of up to 200,000 keys passed.
GPU_WATCHDOG: dict[str, Any] = {
    "generations": (13, 14),  # applegpu_g13, g14: M1 and M2
    "keys": 65_536,
    "seen_from": 90_000,
    "source": (
        "https://github.com/ml-explore/mlx/issues/3302",
        "https://github.com/ml-explore/mlx/pull/3307",
        "https://github.com/ml-explore/mlx-lm/issues/1087",
        "https://github.com/jundot/omlx/issues/1387",
        "https://github.com/youssofal/MTPLX/issues/422",
        "https://github.com/ml-explore/mlx/issues/3267",
    ),
}
# MLX counts its Metal buffers and refuses one more than iogpu.rsrc_limit, which macOS does not set
# (mlx backend/metal/device_info.cpp). ArraysCache.advance (mlx-lm models/cache.py) makes a scalar a
# call that is evaluated only in the layer whose mask is built; BatchGenerator pads caches, so that
# each other recurrent layer leaks a buffer a token. Measured with mlx-lm 0.32.2: 8.00 a token for
# 9 layers, 17.00 for 18. BatchKVCache.offset is such a chain too, in hybrids whose attention rotates
# nothing and so never reads it: one more for each of these layers (measured with the configs of
# tests/arch/cases). mlx_lm.generate pads nothing and leaks nothing.
BUFFER_COUNT: dict[str, Any] = {
    "buffers": 499_000,
    "last_mlx_lm": (0, 32, 2),
    # The classes that call advance, mlx-lm 0.32.2; those of Jamba, Mamba, RWKV-7 and
    # RecurrentGemma do not.
    "recurrent": frozenset(
        {
            *("bailing_hybrid", "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid"),
            *("kimi_k3", "kimi_linear", "lfm2", "lfm2_moe", "mamba2", "nemotron_h"),
            *("olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
        }
    ),
    # Hybrids with attention without rotary embeddings.
    "attention": frozenset({"granitemoehybrid", "jamba", "kimi_linear", "nemotron_h"}),
    "source": (
        "https://github.com/ml-explore/mlx-lm/issues/1845",
        "https://github.com/ml-explore/mlx-lm/issues/1641",
        "https://github.com/ml-explore/mlx-lm/issues/1672",
        "https://github.com/ml-explore/mlx-lm/issues/1332",
        "https://github.com/unslothai/unsloth-zoo/pull/1127",
    ),
}
