"""Published sizes of classes that no formula describes; none of them is in a recording.

From the configs of the models on the Hub, and from the defaults of mlx-lm's ModelArgs, which its
authors took from them: zai-org/GLM-4.7-Flash, karpathy/nanochat-d32, arcee-ai/Trinity-Mini and
Trinity-Nano, LGAI-EXAONE/K-EXAONE-236B-A23B, tencent/Youtu-LLM-2B,
meituan-longcat/LongCat-Flash-Chat, pfnet/plamo-13b,
deepseek-ai/deepseek-moe-16b-base, EleutherAI/gpt-j-6b, bigcode/starcoder and bigcode/santacoder,
Nikity/lille-130m-instruct, Nanbeige/Nanbeige4.1-3B, JetBrains/Mellum2, XHToken/Spark-X2.5-4B, and
Muse Glimmer 30B.
"""

from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
_LLLG = [_SLIDING, _SLIDING, _SLIDING, _FULL]

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "glm4_moe_lite": [{"n_routed_experts": 64, "n_shared_experts": 1}],
    "nanochat": [
        {},
        {
            "hidden_size": 2048,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 8192,
        },
    ],
    "afmoe": [
        {"layer_types": _LLLG * 8},
        {
            "layer_types": _LLLG * 14,
            "num_hidden_layers": 56,
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "intermediate_size": 3072,
            "moe_intermediate_size": 256,
        },
    ],
    "youtu_llm": [{}],
    "exaone_moe": [
        {
            "vocab_size": 153600,
            "hidden_size": 6144,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "sliding_window": 128,
            "layer_types": _LLLG * 12,
            "is_moe_layer": [False] + [True] * 47,
        }
    ],
    "longcat_flash": [
        {
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "hidden_size": 6144,
            "ffn_hidden_size": 12288,
            "moe_topk": 12,
            "expert_ffn_hidden_size": 2048,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "num_layers": 28,
            "vocab_size": 131072,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "routed_scaling_factor": 6.0,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e7,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_bias": False,
        }
    ],
    "plamo": [
        {
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "intermediate_size": 13824,
            "num_attention_heads": 40,
            "rms_norm_eps": 1e-6,
            "vocab_size": 50432,
        }
    ],
    "talkie": [{}],
    "deepseek": [
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        }
    ],
    "Klear": [
        {
            "hidden_size": 2048,
            "num_hidden_layers": 32,
            "intermediate_size": 7168,
            "num_attention_heads": 32,
            "attention_bias": False,
            "mlp_only_layers": [],
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 896,
            "rms_norm_eps": 1e-5,
            "vocab_size": 151936,
            "num_key_value_heads": 4,
            "rope_theta": 500000.0,
            "max_position_embeddings": 65536,
            "norm_topk_prob": True,
        }
    ],
    "mellum": [
        {
            "hidden_size": 2304,
            "num_hidden_layers": 28,
            "intermediate_size": 7168,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "vocab_size": 98304,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "layer_types": _LLLG * 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 8192,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.2772588722239782,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        }
    ],
    "muse_glimmer": [{"layer_types": _LLLG * 13}],
    "spark2_5": [
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "intermediate_size": 10240,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 131072,
            "sliding_window": 512,
            "layer_types": _LLLG * 9,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5000000},
                "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000},
            },
        }
    ],
    "gptj": [{}],
    "gpt_bigcode": [
        {
            "n_embd": n_embd,
            "n_layer": layers,
            "n_head": heads,
            "n_inner": 4 * n_embd,
            "n_positions": positions,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": vocabulary,
        }
        for n_embd, layers, heads, positions, vocabulary in (
            (6144, 40, 48, 8192, 49152),
            (2048, 24, 16, 2048, 49280),
        )
    ],
    "lille-130m": [
        {
            "block_size": 512,
            "layer_norm_eps": 1e-5,
            "n_embd": 640,
            "n_head": 10,
            "n_kv_heads": 5,
            "n_layer": 24,
            "rope_theta": 10000.0,
            "vocab_size": 32768,
        }
    ],
    "nanbeige": [
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "intermediate_size": 10496,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 7e7,
            "vocab_size": 166144,
            "max_position_embeddings": 65536,
        }
    ],
}
CONFIGS = {
    f"{model_type}-{number}": {"model_type": model_type, **config}
    for model_type, configs in PUBLISHED.items()
    for number, config in enumerate(configs)
}
