"""The models of the kit: small, with the shapes on which MLX's kernels depend.

Heads of 128 and 64 have a fused kernel on Metal and heads of 256 have none (mlx/backend/metal/
scaled_dot_product_attention.cpp, 0.32); the scan of qwen3_next is a Metal kernel of mlx-lm.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Backend
from memfit.probes.experiments.points import REPEATS

VOCABULARY = 4096
GROUP_SIZE = 64
_COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


class KitModel(NamedTuple):
    """A model with random weights."""

    config: dict[str, Any]
    bits: int | None = 4
    """None: as the config has it, in bfloat16."""


MODELS = {
    "dense": KitModel({**_COMMON, "model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 128}),
    "mixture": KitModel(
        {
            **_COMMON,
            **_EXPERTS,
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "head_dim": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    ),
    "hybrid": KitModel(
        {
            **_COMMON,
            **_EXPERTS,
            "model_type": "qwen3_next",
            "num_hidden_layers": 4,
            "head_dim": 128,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 256,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.25,
        }
    ),
    "window": KitModel(
        {
            **_COMMON,
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "head_dim": 256,
            "num_attention_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 256,
            "sliding_window_pattern": 3,
        },
        bits=None,
    ),
    "latent": KitModel(
        {
            **_COMMON,
            "model_type": "deepseek_v3",
            "num_hidden_layers": 3,
            "num_key_value_heads": 8,
            "moe_intermediate_size": 256,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "kv_lora_rank": 128,
            "q_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "attention_bias": False,
            "topk_method": "noaux_tc",
            "rope_scaling": None,
        }
    ),
}

# Qwen2-VL is the smallest of mlx-vlm's classes whose processor reads nothing but these files.
SEEING: dict[str, Any] = {
    **_COMMON,
    "model_type": "qwen2_vl",
    "num_hidden_layers": 3,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "image_token_id": VOCABULARY - 2,
    "video_token_id": VOCABULARY - 1,
    "vision_start_token_id": VOCABULARY - 4,
    "vision_config": {
        "depth": 3,
        "embed_dim": 256,
        "hidden_size": 512,
        "num_heads": 4,
        "mlp_ratio": 4,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "model_type": "qwen2_vl",
    },
}
IMAGE_SIDE = 448


class Scale(NamedTuple):
    """How long the runs are."""

    tokens: int
    step: int
    batch: int
    repeats: int

    def workloads(self) -> dict[str, Workload]:
        """Return what each model generates, by its name in the kit."""
        usual = Workload(prompt_tokens=self.tokens, max_tokens=8, prefill_step=self.step)
        return {
            f"{self.tokens} tokens": usual,
            f"{self.tokens} tokens, KV 8 bits": replace(usual, kv_bits=8, quantized_kv_start=0),
            f"{self.tokens} tokens, batch {self.batch}": replace(usual, batch=self.batch),
        }


def scale_of(backend: Backend) -> Scale:
    """Return the scale for a backend: MLX's CPU backend computes about 1 GFLOP in a second."""
    return Scale(32, 8, 2, 1) if backend == "cpu" else Scale(2048, 512, 4, REPEATS)
