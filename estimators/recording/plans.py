"""The plans of the recorded classes: small configs, and what of them is drawn."""

from collections.abc import Mapping
from typing import Any

from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.recording.classes import ClassPlan

# ---- what is common to many classes

WIDTHS = {
    "hidden_size": range(96, 640, 16),
    "intermediate_size": range(128, 640, 16),
    "vocab_size": range(300, 900, 7),
}
PACKED_WIDTHS = {
    "hidden_size": range(128, 960, 64),
    "intermediate_size": range(128, 960, 64),
}
HEADS = {
    "num_attention_heads": (4, 8, 12, 16, 24),
    "num_key_value_heads": (2, 4),
}
# Of widths that Metal has kernels for: those of others hold all scores, in graphs of their own.
HEAD_DIMS = {"head_dim": (64, 128)}
EXPERTS = {
    "moe_intermediate_size": range(96, 480, 16),
    "num_experts_per_tok": (2, 3, 4, 5, 6),
}
PACKED_LATENT = {"qk_nope_head_dim": (64, 128, 192)}
PACKED_EXPERTS = {"moe_intermediate_size": range(128, 640, 64)}
LATENT = {
    "num_attention_heads": (4, 8, 12, 20),
    "kv_lora_rank": (192, 320, 384),
    "q_lora_rank": range(64, 320, 64),
    "qk_rope_head_dim": (32, 64),
    "qk_nope_head_dim": (64, 96, 128, 192),
    "v_head_dim": (64, 128, 192, 256),
}
GROUPED = RecordedAttention("num_attention_heads", "num_key_value_heads", "head_dim", "head_dim")
WINDOWED = GROUPED._replace(keys="W1")
# Of a chunk all heads have keys and values of their own; a token reads what they are made from.
UNFOLDED = RecordedAttention(
    "num_attention_heads",
    "num_attention_heads",
    "qk_nope_head_dim",
    "v_head_dim",
    when="L > 1",
    masks=("array",),
)
FOLDED = RecordedAttention(
    "num_attention_heads",
    "1",
    "kv_lora_rank",
    "kv_lora_rank",
    when="L == 1",
    masks=("array",),
)
# Hidden sizes that heads of 64 and of 128 divide.
SPLIT_WIDTHS = tuple((heads * dim, heads) for heads in (4, 8, 12, 16, 20) for dim in (64, 128))
SPLIT = {
    **WIDTHS,
    **EXPERTS,
    "hidden_size num_attention_heads": SPLIT_WIDTHS,
    "num_key_value_heads": (2, 4),
}
# The scores of one expert are not normalised.
SEVERAL_EXPERTS = "num_experts_per_tok > 1"
# mlx-lm models/switch_layers.py sorts the rows of experts from 64 on.
SORTED = "B*L*num_experts_per_tok >= 64"


def same_names(*groups: Mapping[str, Any], **others: str) -> Mapping[str, str]:
    return {name: name for group in groups for name in group} | others


WINDOWED_MIXTURE: dict[str, Any] = {
    "dims": same_names(
        WIDTHS,
        HEADS,
        HEAD_DIMS,
        EXPERTS,
        num_experts="num_experts",
        num_shared_experts="num_shared_experts",
        W="sliding_window",
    ),
    "draws": {
        **WIDTHS,
        **HEADS,
        **HEAD_DIMS,
        **EXPERTS,
        "num_experts": range(8, 40, 2),
        "num_shared_experts": (1, 2, 3),
        "sliding_window": (128, 256, 512, 768, 1024),
    },
    "packed_draws": {**PACKED_WIDTHS, **PACKED_EXPERTS},
}


SLIDING, FULL = "sliding_attention", "full_attention"

# ---- the classes

PLANS = (
    ClassPlan(
        base={
            "model_type": "qwen3",
            "num_hidden_layers": 5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS},
        packed_draws={**PACKED_WIDTHS},
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={"model_type": "glm4_moe_lite", "num_hidden_layers": 5},
        dims=same_names(
            WIDTHS,
            EXPERTS,
            LATENT,
            n_routed_experts="n_routed_experts",
            n_shared_experts="n_shared_experts",
        ),
        draws={
            **WIDTHS,
            **EXPERTS,
            **LATENT,
            "n_routed_experts": range(8, 40, 2),
            "n_shared_experts": (1, 2, 3),
        },
        packed_draws={**PACKED_WIDTHS, **PACKED_EXPERTS, **PACKED_LATENT},
        kinds=("i >= first_k_dense_replace and i % moe_layer_freq == 0",),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS,),
        attention=(UNFOLDED, FOLDED),
    ),
    ClassPlan(
        base={"model_type": "nanochat", "num_hidden_layers": 5},
        dims=same_names(
            WIDTHS,
            num_attention_heads="num_attention_heads",
            num_key_value_heads="num_key_value_heads",
            head_dim="hidden_size//num_attention_heads",
        ),
        draws={
            **WIDTHS,
            "hidden_size num_attention_heads": SPLIT_WIDTHS,
            "num_key_value_heads": (2, 4),
        },
        packed_draws={"intermediate_size": range(128, 960, 64)},
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={
            "model_type": "afmoe",
            "num_hidden_layers": 12,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 3,
        },
        **WINDOWED_MIXTURE,
        kinds=("layer_types[i]", "i >= num_dense_layers"),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS,),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "youtu_llm",
            "num_hidden_layers": 5,
        },
        dims=same_names(WIDTHS, LATENT),
        draws={**WIDTHS, **LATENT},
        packed_draws={**PACKED_WIDTHS, **PACKED_LATENT},
        attention=(
            RecordedAttention(
                "num_attention_heads",
                "num_attention_heads",
                "qk_nope_head_dim + qk_rope_head_dim",
                "v_head_dim",
            ),
        ),
    ),
    ClassPlan(
        base={
            "model_type": "exaone_moe",
            "num_hidden_layers": 12,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 3,
            "is_moe_layer": [False] + [True] * 11,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
        **WINDOWED_MIXTURE,
        kinds=("layer_types[i]", "is_moe_layer[i]"),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS,),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "solar_open",
            "num_hidden_layers": 5,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "partial_rotary_factor": 1.0,
        },
        dims=same_names(
            WIDTHS,
            HEADS,
            HEAD_DIMS,
            EXPERTS,
            n_routed_experts="n_routed_experts",
            n_shared_experts="n_shared_experts",
        ),
        draws={
            **WIDTHS,
            **HEADS,
            **HEAD_DIMS,
            **EXPERTS,
            "n_routed_experts": range(8, 40, 2),
            "n_shared_experts": (1, 2),
        },
        packed_draws={**PACKED_WIDTHS, **PACKED_EXPERTS},
        kinds=("i >= first_k_dense_replace",),
        features=(SORTED,),
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={
            "model_type": "longcat_flash",
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "num_layers": 5,
            "max_position_embeddings": 4096,
            "routed_scaling_factor": 6.0,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e7,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_bias": False,
        },
        dims=same_names(
            LATENT,
            all_experts="n_routed_experts + zero_expert_num",
            **{
                n: n
                for n in (
                    "hidden_size",
                    "ffn_hidden_size",
                    "expert_ffn_hidden_size",
                    "moe_topk",
                    "n_routed_experts",
                    "zero_expert_num",
                    "vocab_size",
                )
            },
        ),
        draws={
            **LATENT,
            "kv_lora_rank": (192, 320, 384),
            "q_lora_rank": (64, 128, 256, 448),
            "hidden_size": range(96, 640, 16),
            "ffn_hidden_size": range(128, 640, 16),
            "expert_ffn_hidden_size": range(96, 480, 16),
            "vocab_size": range(300, 900, 7),
            "moe_topk": (2, 3, 4, 5, 6),
            "n_routed_experts": range(8, 40, 2),
            "zero_expert_num": range(2, 20, 2),
        },
        packed_draws={
            **PACKED_LATENT,
            "hidden_size": range(128, 960, 64),
            "ffn_hidden_size": range(128, 960, 64),
            "expert_ffn_hidden_size": range(128, 640, 64),
        },
        layer_count="num_layers",
        features=("B*L*moe_topk >= 64",),
        # Equal ones have one factor of scale.
        guards=("q_lora_rank != kv_lora_rank", "moe_topk > 1"),
        attention=(UNFOLDED, FOLDED),
    ),
    ClassPlan(
        base={
            "model_type": "plamo",
            "num_hidden_layers": 5,
            "rms_norm_eps": 1e-6,
        },
        dims={
            **{
                n: n
                for n in (
                    "hidden_size",
                    "intermediate_size",
                    "vocab_size",
                    "num_attention_heads",
                    "n_shared_head",
                )
            },
            "head_dim": "hidden_size//num_attention_heads",
            "num_key_value_heads": "(num_attention_heads + n_shared_head - 1)//n_shared_head",
        },
        draws={
            "hidden_size num_attention_heads": SPLIT_WIDTHS,
            "intermediate_size": range(128, 640, 16),
            "vocab_size": range(300, 900, 7),
            "n_shared_head": (2, 4),
        },
        packed_draws={"intermediate_size": range(128, 960, 64)},
        guards=("hidden_size % num_attention_heads == 0",),
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={"model_type": "talkie", "num_hidden_layers": 5},
        dims=same_names(WIDTHS, HEAD_DIMS, num_attention_heads="num_attention_heads"),
        draws={**WIDTHS, **HEAD_DIMS, "num_attention_heads": (2, 4, 6, 8, 12)},
        packed_draws={**PACKED_WIDTHS},
        attention=(GROUPED._replace(kv_heads="num_attention_heads"),),
    ),
    ClassPlan(
        base={"model_type": "deepseek", "num_hidden_layers": 6, "first_k_dense_replace": 1},
        dims=same_names(
            WIDTHS,
            EXPERTS,
            HEADS,
            n_routed_experts="n_routed_experts",
            n_shared_experts="n_shared_experts",
            head_dim="hidden_size//num_attention_heads",
        ),
        draws={
            **SPLIT,
            "n_routed_experts": range(8, 40, 2),
            "n_shared_experts": (1, 2),
        },
        packed_draws={"intermediate_size": range(128, 960, 64), **PACKED_EXPERTS},
        kinds=("i >= first_k_dense_replace and i % moe_layer_freq == 0",),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS,),
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={
            "model_type": "Klear",
            "num_hidden_layers": 5,
            "attention_bias": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
        },
        dims=same_names(
            WIDTHS,
            EXPERTS,
            HEADS,
            num_experts="num_experts",
            n_shared_experts="n_shared_experts",
            head_dim="hidden_size//num_attention_heads",
        ),
        draws={
            **WIDTHS,
            **EXPERTS,
            "hidden_size num_attention_heads": SPLIT_WIDTHS,
            "num_key_value_heads": (2, 4),
            "num_experts": range(8, 40, 2),
            "n_shared_experts": (1, 2),
        },
        packed_draws={"intermediate_size": range(128, 960, 64), **PACKED_EXPERTS},
        kinds=("i not in mlp_only_layers and (i + 1) % decoder_sparse_step == 0",),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS, "hidden_size % num_attention_heads == 0"),
        attention=(GROUPED,),
    ),
)

CLASSES = {plan.base["model_type"]: plan for plan in PLANS}
