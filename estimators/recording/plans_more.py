"""Plans of further recorded classes: with experts, latent attention and windows."""

from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.plans import (
    EXPERTS,
    FOLDED,
    FULL,
    GROUPED,
    HEAD_DIMS,
    HEADS,
    LATENT,
    PACKED_EXPERTS,
    PACKED_LATENT,
    PACKED_WIDTHS,
    PLANS,
    SLIDING,
    SORTED,
    SPLIT_WIDTHS,
    WIDTHS,
    WINDOWED,
    same_names,
)

_PLAIN_ROPES = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in (FULL, SLIDING)}
_THREE_OF_FOUR = [SLIDING, SLIDING, SLIDING, FULL] * 3
_WINDOWS = (128, 256, 512, 768, 1024)
_SPLIT = {
    **WIDTHS,
    **EXPERTS,
    "hidden_size num_attention_heads": SPLIT_WIDTHS,
    "num_key_value_heads": (2, 4),
}

MORE = (
    ClassPlan(
        base={
            "model_type": "mistral4",
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 0,
            "topk_group": 1,
            "n_group": 1,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "llama_4_scaling_beta": 0.1,
            },
        },
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
        kinds=("i >= first_k_dense_replace",),
        features=(SORTED,),
        attention=(
            RecordedAttention(
                "num_attention_heads",
                "num_attention_heads",
                "qk_nope_head_dim + qk_rope_head_dim",
                "v_head_dim",
                when="L > 1",
            ),
            FOLDED,
        ),
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
            **_SPLIT,
            "n_routed_experts": range(8, 40, 2),
            "n_shared_experts": (1, 2),
        },
        packed_draws={"intermediate_size": range(128, 960, 64), **PACKED_EXPERTS},
        kinds=("i >= first_k_dense_replace and i % moe_layer_freq == 0",),
        features=(SORTED,),
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
            **_SPLIT,
            "num_experts": range(8, 40, 2),
            "n_shared_experts": (1, 2),
        },
        packed_draws={"intermediate_size": range(128, 960, 64), **PACKED_EXPERTS},
        kinds=("i not in mlp_only_layers and (i + 1) % decoder_sparse_step == 0",),
        features=(SORTED,),
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={
            "model_type": "plamo3",
            "num_hidden_layers": 12,
            "sliding_window_pattern": 4,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS, W="window_size"),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS, "window_size": _WINDOWS},
        packed_draws={**PACKED_WIDTHS},
        kinds=("(i + 1) % sliding_window_pattern == 0",),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "mellum",
            "num_hidden_layers": 12,
            "layer_types": _THREE_OF_FOUR,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "norm_topk_prob": True,
            "rope_parameters": _PLAIN_ROPES,
        },
        dims=same_names(
            WIDTHS, HEADS, HEAD_DIMS, EXPERTS, num_experts="num_experts", W="sliding_window"
        ),
        draws={
            **WIDTHS,
            **HEADS,
            **HEAD_DIMS,
            **EXPERTS,
            "num_experts": range(8, 40, 2),
            "sliding_window": _WINDOWS,
        },
        packed_draws={**PACKED_WIDTHS, **PACKED_EXPERTS},
        kinds=("layer_types[i]",),
        features=(SORTED,),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "spark2_5",
            "num_hidden_layers": 12,
            "layer_types": _THREE_OF_FOUR,
            "rope_parameters": _PLAIN_ROPES,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS, W="sliding_window"),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS, "sliding_window": _WINDOWS},
        packed_draws={**PACKED_WIDTHS},
        kinds=("layer_types[i]",),
        attention=(GROUPED, WINDOWED),
    ),
)

CLASSES = {plan.base["model_type"]: plan for plan in (*PLANS, *MORE)}
