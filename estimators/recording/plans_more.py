"""Plans of further recorded classes: with experts."""

from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.plans import (
    EXPERTS,
    GROUPED,
    HEADS,
    PACKED_EXPERTS,
    PLANS,
    SORTED,
    SPLIT_WIDTHS,
    WIDTHS,
    same_names,
)

_SPLIT = {
    **WIDTHS,
    **EXPERTS,
    "hidden_size num_attention_heads": SPLIT_WIDTHS,
    "num_key_value_heads": (2, 4),
}

MORE = (
    ClassPlan(
        base={
            "model_type": "deepseek",
            "num_hidden_layers": 6,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        },
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
)

CLASSES = {plan.base["model_type"]: plan for plan in (*PLANS, *MORE)}
