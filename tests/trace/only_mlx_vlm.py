"""Small configs of classes that mlx-vlm has and mlx-lm has not, for prompts of text.

Keys and the ratios of their values are those of the classes' own defaults (mlx-vlm 0.7.10,
models/<model_type>/config.py); widths are small.
"""

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
_MINIMAX_M3: dict[str, Any] = {
    **_SIZES,
    "model_type": "minimax_m3",
    "intermediate_size": 128,
    "dense_intermediate_size": 512,
    "shared_intermediate_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk_blocks": 4,
    "index_block_size": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm5_next": {
        "model_type": "glm5_next",
        "text_config": {
            **_SIZES,
            **_LATENT,
            **_EXPERTS,
            "model_type": "glm5_next_text",
            "qk_rope_head_dim": 0,
            "index_topk": 256,
            "index_head_dim": 32,
            "index_n_heads": 4,
            "linear_head_dim": 64,
            "linear_num_heads": 4,
            "first_k_dense_replace": 1,
        },
        "vision_config": {
            **{"depth": 2, "hidden_size": 128, "num_heads": 4, "out_hidden_size": 256},
            **{"intermediate_size": 256, "projection_intermediate_size": 256},
        },
    },
    "deepseek_v4": {
        **_SIZES,
        **_EXPERTS,
        **{"model_type": "deepseek_v4", "num_hidden_layers": 5, "num_key_value_heads": 1},
        **{"q_lora_rank": 128, "qk_rope_head_dim": 32, "num_hash_layers": 1, "o_groups": 2},
        **{"o_lora_rank": 64, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64},
        **{"sliding_window": 128},
    },
    "qwen4_exp": {
        "model_type": "qwen4_exp",
        "text_config": {
            **_SIZES,
            "model_type": "qwen4_exp_text",
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64},
            **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 8},
            **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 128},
            **{"moe_intermediate_size": 128, "hc_lowrank": 32, "indexer_head_dim": 32},
            **{"indexer_budget": 256},
            "rope_parameters": {
                "type": "default",
                "mrope_section": [4, 2, 2],
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {
            **{"depth": 2, "hidden_size": 128, "num_heads": 4, "out_hidden_size": 256},
            **{"intermediate_size": 256, "deepstack_visual_indexes": []},
            **{"num_position_embeddings": 256},
        },
    },
    "hy_v4": {
        **_SIZES,
        **_LATENT,
        **_EXPERTS,
        **{"model_type": "hy_v4", "index_head_dim": 32, "index_n_heads": 4, "index_topk": 256},
        "num_key_value_heads": 1,
    },
    "step3p7": {
        "model_type": "step3p7",
        "text_config": {
            **_SIZES,
            **{"model_type": "step3p5", "num_attention_groups": 2, "moe_num_experts": 8},
            **{"moe_intermediate_size": 128, "moe_top_k": 2, "share_expert_dim": 128},
            **{"moe_layers_enum": [1, 2, 3], "sliding_window": 256},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "attention_other_setting": {
                **{"attention_type": "sliding_attention", "num_attention_heads": 4},
                **{"num_attention_groups": 2, "head_dim": 64},
            },
        },
        "vision_config": {"width": 128, "layers": 2, "heads": 4, "mlp_ratio": 2.0},
    },
    "minimax_m3": _MINIMAX_M3,
    "kolibri1": {
        **_SIZES,
        **{"model_type": "kolibri1", "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
        **{"sliding_window": 256},
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "k2_horizon": {**_SIZES, "model_type": "k2_horizon"},
    "limite": {
        **_SIZES,
        **{"model_type": "limite", "tie_word_embeddings": True, "attn_gate_channels": 64},
        **{"ve_dim": 64, "global_layers": [3], "sliding_window": 256, "mudd": False},
    },
    "z1t": {
        **{"model_type": "z1t", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 8000},
        **{"max_position_embeddings": 32768},
    },
    "xing4_0": {**_SIZES, **_LATENT, **_EXPERTS, "model_type": "xing4_0"},
    "cohere2_moe": {
        **_SIZES,
        **{"model_type": "cohere2_moe", "num_experts": 8, "num_experts_per_tok": 2},
        **{"sliding_window": 256, "moe_num_shared_experts": 1, "intermediate_size": 128},
    },
    "flint": {
        **_SIZES,
        **{"model_type": "flint", "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
        **{"sliding_window": 257},
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "hrm_text": {**_SIZES, "model_type": "hrm_text", "num_hidden_layers": 2},
    "longcat_flash_sparse": {
        **_LATENT,
        **{"model_type": "longcat_flash_sparse", "hidden_size": 256, "ffn_hidden_size": 512},
        **{"expert_ffn_hidden_size": 128, "moe_topk": 2, "n_routed_experts": 8, "num_layers": 2},
        **{"vocab_size": 8000, "num_attention_heads": 4, "index_n_heads": 4},
        **{"index_head_dim": 32, "index_topk": 256, "max_position_embeddings": 32768},
    },
    "mistral_large3": {
        "model_type": "mistral_large3",
        "text_config": {**_SIZES, **_LATENT, **_EXPERTS, "first_k_dense_replace": 1},
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 128, "num_hidden_layers": 2},
            **{"intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32},
            **{"patch_size": 14, "image_size": 448, "num_channels": 3, "rope_theta": 10000.0},
        },
    },
    "mimo_v2": {
        **_SIZES,
        **_EXPERTS,
        **{"model_type": "mimo_v2", "head_dim": 96, "v_head_dim": 64, "swa_head_dim": 96},
        **{"swa_v_head_dim": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
        **{"sliding_window_size": 128, "n_shared_experts": None},
        **{"hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1]},
        "vision_config": {
            **{"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4},
            **{"num_key_value_heads": 2, "num_query_groups": 2, "out_hidden_size": 256},
            **{"qk_channels": 32, "fullatt_block_indexes": [0], "vit_window_attn_types": [-1, 0]},
        },
    },
}
