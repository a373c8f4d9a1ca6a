"""What changed between versions of MLX and mlx-lm: a rule holds since one version, until another.

Versions of mlx-lm are the first packages on PyPI with the commit. Which attention is fused:
kernels.py.
"""

from typing import Any

CHANGES: dict[str, dict[str, Any]] = {
    # A negation was missing, so that a compiled function wrote over none of its inputs.
    "compiled_copies": {
        "package": "mlx",
        "since": (0, 26, 1),
        "until": (0, 30, 1),
        "source": "mlx/backend/common/compiled.cpp, compiled_allocate_outputs: 0bb89e9e5 (#2240) to 3c8ce9b00 (#2897)",
    },
    # GPUs with neural accelerators sum long products from parts.
    "nax_split_k": {
        "package": "mlx",
        "since": (0, 30, 4),
        "source": "mlx/backend/metal/matmul.cpp, steel_gemm_splitk_axpby_nax: 7ed2b6b93 (#3018)",
    },
    # Products of few rows with a packed weight are summed from parts too.
    "quantized_split_k": {
        "package": "mlx",
        "since": (0, 31, 2),
        "source": "mlx/backend/metal/quantized.cpp, qmm_splitk: 38ad25708 (#3120)",
    },
    # Heads that are not in rows are rotated where they are.
    "cuda_rope_in_place": {
        "package": "mlx",
        "since": (0, 32, 0),
        "source": "mlx/backend/cuda/rope.cu: 39886de46 (#3704)",
    },
    # The last chunk of a prompt held its last token too, and logits were made of all of it.
    "logits_of_last_chunk": {
        "package": "mlx-lm",
        "until": (0, 27, 0),
        "source": "mlx_lm/generate.py, generate_step: until 24fefe3d (#406, 2025-08-28)",
    },
    # Mamba-2's matrix form took a whole call at once, not 256 tokens of it.
    "whole_ssm": {
        "package": "mlx-lm",
        "until": (0, 28, 3),
        "source": "mlx_lm/models/ssm.py, ssm_attn: until 44c74e1d (#525, 2025-10-02)",
    },
    # Two kernels with an array between them, where one compiled function multiplies now.
    "product_after_silu": {
        "package": "mlx-lm",
        "until": (0, 30, 4),
        "source": "mlx_lm/models/activations.py, swiglu: since edbf61dd (#753, 2026-01-14)",
    },
    "narrow_states": {
        "package": "mlx-lm",
        "until": (0, 31, 2),
        "source": "mlx_lm/models/gated_delta.py until 735a43b2 (#997, 2026-03-15), models/ssm.py until 73c85504 (#992, 2026-03-16)",
    },
    # Layers that share keys and values of others had projections of their own, never used.
    "unused_projections": {
        "package": "mlx-lm",
        "until": (0, 31, 3),
        "source": "mlx_lm/models/gemma4_text.py until 4f5cbd2a (#1158, 2026-04-21)",
    },
}

OLDEST_MLX_LM = (0, 26, 0)
"""The loop of generate_step is described from here on."""

# Classes that kept keys and values of every head, where newer ones keep a latent: too different to
# describe. Model type: the first version that is described, and its commit.
REWRITTEN: dict[str, tuple[tuple[int, ...], str]] = {
    "deepseek_v3": ((0, 30, 6), "f18526f8"),
    "kimi_k2": ((0, 30, 6), "f18526f8"),
    "kimi_k25": ((0, 30, 6), "f18526f8"),
    "joyai_llm_flash": ((0, 30, 6), "f18526f8"),
    "deepseek_v32": ((0, 30, 6), "f18526f8"),
    "glm_moe_dsa": ((0, 30, 6), "f18526f8"),
    "glm4_moe_lite": ((0, 30, 5), "14237020"),
    "longcat_flash": ((0, 30, 7), "ca0d1c96"),
    "longcat_flash_ngram": ((0, 30, 7), "ca0d1c96"),
    "kimi_linear": ((0, 30, 7), "fd6959dc"),
}
