"""The plans of the recorded classes: small configs, and what of them is drawn."""

from collections.abc import Mapping
from typing import Any

from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.plan_sizes import (
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
    SEVERAL_EXPERTS,
    SLIDING,
    SORTED,
    SPLIT,
    SPLIT_WIDTHS,
    UNFOLDED,
    WIDTHS,
    WINDOWED,
    WINDOWED_LAYERS,
    WINDOWED_MIXTURE,
    same_names,
)
from memfit.estimators.recording.plans_dense import DENSE


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


# Of both published models of mellum.
_YARN = {
    "rope_theta": 500000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_IS_YARN = " and ".join(
    f"rope_parameters['{FULL}']['{name}'] == {int(value)}" for name, value in _YARN.items()
)
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
            "layer_types": WINDOWED_LAYERS,
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
        # A token's kernel takes few widths: each of several sums.
        draws={**WIDTHS, **LATENT, "qk_rope_head_dim": (32, 64, 96, 128)},
        packed_draws={**PACKED_WIDTHS},
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
            "layer_types": WINDOWED_LAYERS,
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
            "model_type": "mellum",
            "intermediate_size": 512,
            "num_hidden_layers": 12,
            "layer_types": WINDOWED_LAYERS,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "norm_topk_prob": True,
            "rope_parameters": {
                FULL: {"rope_type": "yarn", **_YARN, "attention_factor": 1.277},
                SLIDING: {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
        dims={
            **_without(WINDOWED_MIXTURE["dims"], "num_shared_experts", "intermediate_size"),
            # Of others the rope has other constants, which can equal one of the graph, or scales
            # nothing (rope_utils.py, YarnRoPE).
            "is_published": f"1 if {_IS_YARN} else 2",
        },
        draws={
            **_without(WINDOWED_MIXTURE["draws"], "num_shared_experts", "intermediate_size"),
            "head_dim": (128,),
        },
        packed_draws=_without(WINDOWED_MIXTURE["packed_draws"], "intermediate_size"),
        kinds=("layer_types[i]",),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS, "is_published == 1"),
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

CLASSES = {plan.base["model_type"]: plan for plan in (*PLANS, *DENSE)}

# By reason: the other classes of mlx-lm 0.32.2 that no formula describes. They are traced.
_UNRECORDED = {
    "loops over tokens or blocks of them": "bailing_moe_linear dbrx plamo2",
    "runs gated delta layers, whose arrays the next call makes": (
        "bailing_hybrid bailing_moe_v3 kimi_k3 olmo_hybrid"
    ),
    "has no two layers alike": "nemotron-nas openelm",
    "runs its layers twice": "iquestloopcoder",
    "rounds masks up to blocks": "phi3small",
    "needs a package that is not installed": "olmo",
    "has no plan yet": (
        "afm7 baichuan_m1 bitnet deepseek_v41 gear laguna longcat_flash_ngram minimax_m3_vl"
        " mistral4 muse_spark phixtral plamo3 prism_hadamard_qwen35"
    ),
}
UNRECORDED = {name: why for why, names in _UNRECORDED.items() for name in names.split()}
"""Why a class has no plan."""
