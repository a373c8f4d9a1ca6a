"""What ends a run on MLX though its bytes fit: one row for each limit that was seen or measured.

docs/accuracy.md has the same table for people.
"""

from typing import Any

# macOS ends the process with kIOGPUCommandBufferCallbackErrorImpactingInteractivity. No limit in
# seconds separates the runs that were killed from those that were not; the keys of the longest
# prefill call and the GPU's generation do. On M2 Ultra 65,536 passed and 131,072 were killed (once,
# in steps of 1,024, they passed), on M2 Max the first was killed between 90,000 and 104,000; M1 has
# the same bfloat16 emulation and slower GPUs. On M3 Ultra 131,072 and 146,838 passed, and the title
# of MTPLX 422 names M3 beside M2 without a run. On M5 no prompt was killed, up to 192,000: no row.
# The display decides too: a training always ended with it on, never with it off (mlx 3267). The variable is the driver's and was
# tried by ltx-2-mlx 75. M1 and M2 emulate bfloat16, which halves the rate of a matrix product.
GPU_WATCHDOG: tuple[dict[str, Any], ...] = (
    {
        "generations": (13, 14),  # applegpu_g13, g14: M1 and M2
        "keys": 65_536,
        "beyond": "tight",
        "reason": (
            "on M1 and M2 macOS may end a prompt beyond 65536 tokens (seen on M2 from 90000 on)"
        ),
        "remedy": (
            "let the display sleep, then try AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1, then a smaller"
            " prefill step (helped once), then float16 weights"
        ),
        "source": (
            "https://github.com/ml-explore/mlx/issues/3302",
            "https://github.com/ml-explore/mlx/pull/3307",
            "https://github.com/ml-explore/mlx-lm/issues/1087",
            "https://github.com/jundot/omlx/issues/1387",
            "https://github.com/youssofal/MTPLX/issues/422",
            "https://github.com/ml-explore/mlx/issues/3267",
            "https://github.com/dgrauet/ltx-2-mlx/issues/75",
        ),
    },
    {
        "generations": (15, 16),  # M3 and M4
        "keys": 131_072,
        "beyond": "unknown",
        "reason": (
            "on M3 and M4 prompts beyond 131072 tokens are little tried: 146838 passed on M3 Ultra"
        ),
        "remedy": "let the display sleep if macOS ends one",
        "source": (
            "https://github.com/ml-explore/mlx/issues/3186",
            "https://github.com/youssofal/MTPLX/issues/422",
        ),
    },
)
# MLX counts its Metal buffers and refuses one more than iogpu.rsrc_limit, which macOS does not set
# (mlx backend/metal/device_info.cpp). ArraysCache.advance (mlx-lm models/cache.py) makes a scalar a
# call that is evaluated only in the layer whose mask is built; BatchGenerator pads caches, so that
# each other recurrent layer leaks a buffer a token. Measured with mlx-lm 0.32.2: 8.00 a token for
# 9 layers, 17.00 for 18. BatchKVCache.offset is such a chain too, in hybrids whose attention rotates
# nothing and so never reads it: one more for each of these layers (measured with the configs of
# tests/arch/cases). mlx_lm.generate pads nothing and leaks nothing.
BUFFER_COUNT: dict[str, Any] = {
    "buffers": 499_000,
    # A run that comes this far is warned of: only what grows reaches it.
    "warned": 250_000,
    "training_source": (
        "https://github.com/ml-explore/mlx/issues/4464",
        "https://github.com/ml-explore/mlx-lm/issues/1185",
        "https://github.com/unslothai/unsloth-zoo/pull/918",
    ),
    # Beside the weights: 100 to 400 in traced runs of every kind of layer.
    "of_a_run": 300,
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
