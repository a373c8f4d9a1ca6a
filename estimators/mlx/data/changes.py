"""What changed between versions of MLX, mlx-lm and mlx-vlm: a rule holds since one version, until another.

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
    # A prompt within one prefill step was one call, with logits of all its tokens.
    "logits_of_short_prompts": {
        "package": "mlx-vlm",
        "until": (0, 7, 0),
        "source": "mlx_vlm/generate/ar.py, should_chunk: until #2119 (2026-08-31)",
    },
    # So was every prompt with images for Gemma 4, whose images see one another.
    "logits_of_gemma4": {
        "package": "mlx-vlm",
        "until": (0, 6, 10),
        "source": "mlx_vlm/models/gemma4/language.py: until dd4ac5e1 (#1750, 2026-08-03)",
    },
}

OLDEST_MLX_LM = (0, 26, 0)
"""The loop of generate_step is described from here on."""

# Of model types that no row of arch/families/ describes: the first package with their class.
# Source: mlx_lm/models, and MODEL_REMAPPING of mlx_lm/utils.py, in the packages on PyPI.
_ADDED: dict[tuple[int, ...], str] = {
    (0, 27, 1): "longcat_flash",
    (0, 28, 0): "Klear lille-130m",
    (0, 28, 3): "nanochat",
    (0, 28, 4): "afmoe bailing_moe_linear",
    (0, 30, 2): "exaone_moe youtu_llm",
    (0, 30, 4): "glm4_moe_lite iquestloopcoder",
    (0, 30, 6): "longcat_flash_ngram",
    (0, 32, 0): (
        "bailing_hybrid bailing_moe_v3 deepseek_v41 deepseek_v41_text gear gptj kimi_k3 laguna mellum"
        " minimax_m3_vl mistral4 muse_glimmer nanbeige olmo_hybrid plamo3 spark2_5 talkie"
    ),
    (0, 32, 1): "prism_hadamard_qwen35",
    (0, 32, 2): "muse_spark",
}
ADDED: dict[str, tuple[int, ...]] = {
    model_type: version for version, types in _ADDED.items() for model_type in types.split()
}
# Of these, the classes that kept keys and values of every head, where newer ones keep a latent: the
# first package as its trace is, and its commit.
REWRITTEN: dict[str, tuple[tuple[int, ...], str]] = {
    "glm4_moe_lite": ((0, 30, 5), "14237020"),
    "longcat_flash": ((0, 30, 7), "ca0d1c96"),
    "longcat_flash_ngram": ((0, 30, 7), "ca0d1c96"),
}
