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
    # Attention of few queries in two passes has more blocks, and partial results of half the width.
    "blocks_of_two_pass_attention": {
        "package": "mlx",
        "since": (0, 30, 4),
        "source": "mlx/backend/metal/scaled_dot_product_attention.cpp, sdpa_vector_2pass: 1935ab445 (#3023)",
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

_ADDED: dict[tuple[int, ...], str] = {
    (0, 26, 1): "exaone4 kimi_k2 lfm2",
    (0, 26, 2): "glm4_moe",
    (0, 26, 3): "gpt_oss hunyuan_v1_dense",
    (0, 26, 4): "bailing_moe lfm2-vl qwen2_5_vl qwen2_vl seed_oss",
    (0, 27, 1): "apertus granitemoe longcat_flash nemotron_h",
    (0, 28, 0): "Klear glm granitemoehybrid lille-130m llama4_text mamba2 qwen3_next",
    (0, 28, 1): "falcon_h1",
    (0, 28, 2): "llava olmo3",
    (0, 28, 3): "jamba lfm2_moe nanochat qwen3_vl qwen3_vl_moe",
    (0, 28, 4): "afmoe bailing_moe_linear deepseek_v32 kimi_linear minimax ministral3",
    (0, 30, 0): "mimo_v2_flash",
    (0, 30, 2): "exaone_moe iquestcoder minimax_m2 rwkv7 solar_open youtu_llm",
    (0, 30, 4): "glm4_moe_lite iquestloopcoder",
    (0, 30, 5): "telechat3",
    (0, 30, 6): "kimi_k25 longcat_flash_ngram step3p5",
    (0, 30, 7): "glm_moe_dsa qwen3_5 qwen3_5_moe",
    (0, 31, 1): "joyai_llm_flash",
    (0, 31, 2): "gemma4 gemma4_text",
    (0, 32, 0): (
        "bailing_hybrid bailing_moe_v3 deepseek_v41 deepseek_v41_text gear gemma4_unified gptj kimi_k3"
        " laguna mellum minimax_m3_vl mistral4 muse_glimmer nanbeige olmo_hybrid plamo3 spark2_5"
        " talkie xverse"
    ),
    (0, 32, 1): "prism_hadamard_qwen35",
    (0, 32, 2): "muse_spark",
}
ADDED: dict[str, tuple[int, ...]] = {
    model_type: version for version, types in _ADDED.items() for model_type in types.split()
}
"""The first package with a class for a model type, of those that `OLDEST_MLX_LM` has none for.

Source: mlx_lm/models, and MODEL_REMAPPING of mlx_lm/utils.py, in the packages on PyPI.
"""
