"""Small models with images: their configs, and what their processors would give them."""

from typing import Any, NamedTuple

from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.plan import ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.processor import image_plan

IMAGE_TOKEN = 7000
_TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8000,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 7001,
    "vision_start_token_id": 7002,
    "vision_end_token_id": 7003,
}
_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
_PATCHES: dict[str, Any] = {
    "depth": 3,
    "num_heads": 4,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


class Case(NamedTuple):
    """One model and prompt."""

    name: str
    config: dict[str, Any]
    plan: ImagePlan
    prefill_step: int = 2048
    dtype: str = "BF16"
    text_tokens: int = 30
    kv_bits: int | None = None
    batch: int = 1

    @property
    def workload(self) -> Workload:
        return Workload(
            prompt_tokens=self.prompt_tokens,
            prefill_step=self.prefill_step,
            kv_bits=self.kv_bits,
            quantized_kv_start=0,
            batch=self.batch,
        )

    @property
    def prompt_tokens(self) -> int:
        return self.plan.token_count + self.text_tokens


def grid(width: int, height: int, patch: int, count: int = 1) -> ImagePlan:
    """Patches in rows, with the grid of each image, as Qwen's processors give them."""
    down, across = height // patch, width // patch
    image = PlannedImage(width, height, down * across, (TokenRun("image", down * across // 4),))
    pixels = (count * down * across, 3 * 2 * patch**2)
    return ImagePlan(
        (image,) * count,
        (
            InputArray("pixel_values", pixels, "float32"),
            InputArray("image_grid_thw", (count, 3), "int64", ((1, down, across),) * count),
        ),
    )


def square(side: int, tokens: int, count: int = 1) -> ImagePlan:
    """Whole images of one size."""
    image = PlannedImage(side, side, 0, (TokenRun("image", tokens),))
    return ImagePlan(
        (image,) * count, (InputArray("pixel_values", (count, 3, side, side), "float32"),)
    )


QWEN2_VL: dict[str, Any] = {
    **{"model_type": "qwen2_vl", **_TEXT, **_MROPE, **_QWEN_TOKENS},
    "vision_config": {
        **_PATCHES,
        **{"model_type": "qwen2_vl", "embed_dim": 160, "hidden_size": 256, "patch_size": 14},
        "mlp_ratio": 4,
    },
}
QWEN2_5_VL: dict[str, Any] = {
    **{"model_type": "qwen2_5_vl", **_TEXT, **_MROPE, **_QWEN_TOKENS},
    "vision_config": {
        **_PATCHES,
        **{"model_type": "qwen2_5_vl", "hidden_size": 160, "out_hidden_size": 256},
        **{"intermediate_size": 432, "patch_size": 14, "window_size": 112},
        **{"fullatt_block_indexes": [1], "tokens_per_second": 2},
    },
}
QWEN3_VL: dict[str, Any] = {
    **{"model_type": "qwen3_vl", **_QWEN_TOKENS},
    "text_config": {
        **_TEXT,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
            "rope_type": "default",
        },
    },
    "vision_config": {
        **_PATCHES,
        **{"model_type": "qwen3_vl", "hidden_size": 144, "out_hidden_size": 256},
        **{"intermediate_size": 432, "patch_size": 16, "num_position_embeddings": 2304},
        "deepstack_visual_indexes": [1],
    },
}
GEMMA3: dict[str, Any] = {
    **{"model_type": "gemma3", "image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 64},
    "vocab_size": 8000,
    "text_config": {
        **_TEXT,
        **{"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2},
        **{"query_pre_attn_scalar": 64, "mm_tokens_per_image": 64},
    },
    "vision_config": {
        **{"model_type": "siglip_vision_model", "hidden_size": 144, "num_hidden_layers": 3},
        **{"intermediate_size": 432, "num_attention_heads": 4, "patch_size": 14},
        **{"image_size": 448, "num_channels": 3, "layer_norm_eps": 1e-6},
    },
}
CASES = (
    Case("Qwen2-VL", QWEN2_VL, grid(448, 336, 14)),
    Case("Qwen2-VL, two images", QWEN2_VL, grid(448, 336, 14, 2), dtype="F32", prefill_step=128),
    Case("Qwen2.5-VL", QWEN2_5_VL, grid(560, 448, 14)),
    Case("Qwen3-VL", QWEN3_VL, grid(512, 384, 16)),
    Case("Qwen3-VL, two images", QWEN3_VL, grid(512, 384, 16, 2)),
    Case("Gemma 3", GEMMA3, square(448, 64)),
    Case("Gemma 3, three images", GEMMA3, square(448, 64, 3)),
)
DIFFUSION_GEMMA: dict[str, Any] = {
    **{"model_type": "diffusion_gemma", "image_token_id": IMAGE_TOKEN, "canvas_length": 128},
    "text_config": {
        **_TEXT,
        **{"model_type": "diffusion_gemma_text", "moe_intermediate_size": 128},
        **{"num_global_key_value_heads": 1, "global_head_dim": 128, "num_experts": 4},
        **{"top_k_experts": 2, "sliding_window": 128, "vocab_size": 20000},
    },
    "vision_config": {
        **{"model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 2},
        **{"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"head_dim": 32, "global_head_dim": 32, "patch_size": 16},
        **{"position_embedding_size": 1024, "pooling_kernel_size": 3},
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    },
}
TEXT = (
    # Chunks in the middle of the first two are not recorded.
    Case("Qwen3-VL, text", QWEN3_VL, ImagePlan((), ()), prefill_step=128, text_tokens=1500),
    Case("Gemma 3, text", GEMMA3, ImagePlan((), ()), prefill_step=128, text_tokens=1500),
    Case("DiffusionGemma, text", DIFFUSION_GEMMA, ImagePlan((), ()), dtype="F32"),
    Case("Qwen2-VL, KV bits", QWEN2_VL, grid(448, 336, 14), text_tokens=700, kv_bits=4),
)


def _wide(name: str, config: dict[str, Any], width: int, height: int, dtype: str = "BF16") -> Case:
    """A model with the arrays of its own processor."""
    images = Images(images=(ImageSize(width, height),))
    plan = image_plan(Checkpoint(name, "local", config, "config.json"), images)
    return Case(name, config, plan, dtype=dtype)


_TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
}
_PIXTRAL = {"model_type": "pixtral", "rope_theta": 10000.0, "head_dim": 32}
_LLAMA = {**_TEXT, "model_type": "llama"}
_QWEN2 = {**_TEXT, "model_type": "qwen2"}
_GLM_ROPE = {"mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5, "rope_theta": 10000}
_IDEFICS: dict[str, Any] = {
    **{"model_type": "idefics3", "image_token_id": IMAGE_TOKEN, "scale_factor": 2},
    **{"vocab_size": 8000, "tie_word_embeddings": False, "pad_token_id": 0},
    "text_config": _LLAMA,
    "vision_config": {
        **_TOWER,
        **{"model_type": "idefics3_vision", "patch_size": 14, "image_size": 364},
    },
}
_CLIP: dict[str, Any] = {
    **{"image_token_index": IMAGE_TOKEN, "vocab_size": 8000},
    "text_config": _LLAMA,
    "vision_config": {
        **_TOWER,
        **{"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336},
        **{"projection_dim": 64, "vocab_size": 8000},
    },
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 14}
_MOLMO2 = {
    **{"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
WIDE = (
    _wide(
        "Pixtral",
        {
            **{"model_type": "pixtral", "image_token_index": 10},
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_TOWER, **_PIXTRAL, "patch_size": 16, "image_size": 512},
        },
        480,
        384,
    ),
    _wide(
        "Mistral 3",
        {
            **{"model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2},
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_TOWER, **_PIXTRAL, "patch_size": 14, "image_size": 560},
        },
        560,
        448,
    ),
    _wide(
        "GLM-4V",
        {
            **{"model_type": "glm4v", **_QWEN_TOKENS, "eos_token_id": [1]},
            **{"image_start_token_id": 7004, "image_end_token_id": 7005},
            **{"video_start_token_id": 7006, "video_end_token_id": 7007},
            "text_config": {
                **_TEXT,
                **{"model_type": "glm4v_text", "attention_bias": True, "eos_token_id": [1]},
                "partial_rotary_factor": 0.5,
                "rope_parameters": {**_GLM_ROPE, "rope_type": "default"},
                "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]},
            },
            "vision_config": {
                **_PATCHES,
                **{"model_type": "glm4v", "hidden_size": 128, "intermediate_size": 384},
                "num_heads": 2,
                **{"out_hidden_size": 256, "patch_size": 14, "image_size": 336},
                **{"rms_norm_eps": 1e-5, "attention_bias": False},
            },
        },
        560,
        448,
    ),
    _wide(
        "GLM-4V, experts",
        {
            **{"model_type": "glm4v_moe", **_QWEN_TOKENS, "eos_token_id": [1]},
            "text_config": {
                **_TEXT,
                **{"model_type": "glm4v_moe_text", "attention_bias": True, "use_qk_norm": False},
                **{"moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1},
                **{"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1},
                **{"topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
                "partial_rotary_factor": 0.5,
                "rope_parameters": {**_GLM_ROPE, "rope_type": "default"},
            },
            "vision_config": {
                **_PATCHES,
                **{"model_type": "glm4v_moe", "hidden_size": 128, "intermediate_size": 384},
                "num_heads": 2,
                **{"out_hidden_size": 256, "patch_size": 14, "image_size": 336},
                **{"rms_norm_eps": 1e-5, "attention_bias": False},
            },
        },
        560,
        448,
    ),
    _wide(
        "GLM-OCR",
        {
            **{"model_type": "glm_ocr", **_QWEN_TOKENS, "eos_token_id": [1]},
            "text_config": {
                **{key: value for key, value in _TEXT.items() if key != "rope_theta"},
                **{"model_type": "glm_ocr_text", "attention_bias": False},
                "rope_parameters": {**_GLM_ROPE, "rope_type": "default"},
            },
            "vision_config": {
                **_PATCHES,
                **{"model_type": "glm_ocr_vision", "hidden_size": 128, "intermediate_size": 384},
                "num_heads": 2,
                **{"out_hidden_size": 256, "patch_size": 14, "image_size": 336},
            },
        },
        560,
        448,
    ),
    _wide(
        "Llama 3.2 Vision",
        {
            **{"model_type": "mllama", "image_token_index": IMAGE_TOKEN},
            "text_config": {
                **_TEXT,
                **{"model_type": "mllama_text_model", "cross_attention_layers": [1]},
            },
            "vision_config": {
                **_TOWER,
                "num_attention_heads": 2,
                **{"model_type": "mllama_vision_model", "patch_size": 14, "image_size": 560},
                **{"num_global_layers": 2, "vision_output_dim": 384, "norm_eps": 1e-5},
                "intermediate_layers_indices": [0, 2],
            },
        },
        640,
        480,
    ),
    _wide("Idefics3", _IDEFICS, 640, 480),
    _wide(
        "SmolVLM",
        {
            **_IDEFICS,
            **{"model_type": "smolvlm", "scale_factor": 4},
            "vision_config": {
                **_TOWER,
                **{"model_type": "smolvlm_vision", "patch_size": 16, "image_size": 512},
            },
        },
        640,
        480,
    ),
    _wide(
        "PaliGemma",
        {
            **{"model_type": "paligemma", "image_token_index": IMAGE_TOKEN, "hidden_size": 256},
            **{"vocab_size": 8000, "projection_dim": 256},
            "text_config": {**_TEXT, "model_type": "gemma", "num_image_tokens": 256},
            "vision_config": {
                **_TOWER,
                **{"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 224},
                "projection_dim": 256,
            },
        },
        640,
        480,
    ),
    _wide("LLaVA", {"model_type": "llava", **_CLIP}, 640, 480),
    # NumPy, which its class needs, takes no bfloat16.
    _wide("LLaVA-NeXT", {"model_type": "llava_next", **_CLIP}, 640, 480, dtype="F16"),
    _wide(
        "Qwen3.5",
        {
            **{"model_type": "qwen3_5", **_QWEN_TOKENS, "tie_word_embeddings": False},
            "text_config": {
                **_TEXT,
                **{"model_type": "qwen3_5_text", "attn_output_gate": True},
                **{"full_attention_interval": 2, "mamba_ssm_dtype": "float32"},
                "layer_types": ["linear_attention", "full_attention"],
                **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 32},
                **{"linear_num_key_heads": 4, "linear_num_value_heads": 4},
                "linear_value_head_dim": 32,
                "rope_parameters": {
                    **{"mrope_interleaved": True, "mrope_section": [3, 3, 2]},
                    **{"rope_type": "default", "rope_theta": 10000},
                    "partial_rotary_factor": 0.25,
                },
            },
            "vision_config": {
                **_PATCHES,
                **{"model_type": "qwen3_5", "deepstack_visual_indexes": [], "hidden_size": 128},
                **{"intermediate_size": 384, "num_position_embeddings": 2304},
                **{"out_hidden_size": 256, "patch_size": 16},
            },
        },
        512,
        384,
    ),
    _wide(
        "InternVL (chat)",
        {
            **{"model_type": "internvl_chat", "image_token_index": IMAGE_TOKEN, "vocab_size": 8000},
            **{"force_image_size": 224, "max_dynamic_patch": 4, "text_config": _QWEN2},
            "vision_config": {
                **_TOWER,
                **{"model_type": "intern_vit_6b", "patch_size": 14, "image_size": 224},
            },
        },
        640,
        480,
    ),
    _wide(
        "InternVL",
        {
            **{"model_type": "internvl", "image_token_id": IMAGE_TOKEN, "max_dynamic_patch": 4},
            "text_config": {**_TEXT, "model_type": "qwen3"},
            "vision_config": {
                **_TOWER,
                **{"model_type": "internvl_vision", "patch_size": 14, "image_size": 448},
            },
        },
        640,
        480,
    ),
    _wide(
        "LLaVA-OneVision",
        {
            **{"model_type": "llava_onevision", "image_token_index": IMAGE_TOKEN},
            **{"vocab_size": 8000, "text_config": _QWEN2},
            "image_grid_pinpoints": [[384 * h, 384 * w] for h in (1, 2) for w in (1, 2)],
            "vision_config": {
                **_TOWER,
                **{"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384},
            },
        },
        640,
        480,
    ),
    _wide(
        "DeepSeek-VL2",
        {
            **{"model_type": "deepseek_vl_v2", "image_token_index": IMAGE_TOKEN},
            "text_config": {
                **_TEXT,
                **{"model_type": "deepseek_v2", "n_routed_experts": None, "kv_lora_rank": 64},
                **{"q_lora_rank": None, "qk_rope_head_dim": 32, "v_head_dim": 32},
                "qk_nope_head_dim": 32,
            },
            "vision_config": {
                **{"model_type": "vision", "layers": 3, "width": 128, "intermediate_size": 384},
                **{"num_attention_heads": 4, "image_size": 384, "patch_size": 14},
            },
            "projector_config": {
                **{"projector_type": "downsample_mlp_gelu", "input_dim": 128, "n_embed": 256},
            },
        },
        640,
        480,
    ),
    _wide(
        "Molmo",
        {
            "model_type": "molmo",
            "text_config": {
                **{"model_type": "molmo", "d_model": 256, "n_heads": 4, "n_kv_heads": 2},
                **{"n_layers": 2, "mlp_hidden_size": 512, "vocab_size": 8000},
                "embedding_size": 8000,
            },
            "vision_config": {
                **{"model_type": "molmo", "hidden_size": 512, "image_emb_dim": 128},
                **{"image_num_heads": 4, "image_num_key_value_heads": 4, "image_num_layers": 4},
                **{"image_head_dim": 32, "image_mlp_dim": 384, "d_model": 256},
                "vit_layers": [-2, -3],
            },
        },
        640,
        480,
    ),
    _wide(
        "Granite Vision",
        {
            **{"model_type": "granite_vision", "image_token_index": IMAGE_TOKEN},
            "image_grid_pinpoints": [[384, 768], [768, 384], [768, 768]],
            "text_config": {**_TEXT, "model_type": "granite"},
            "vision_feature_layer": [-1, -2],
            "vision_config": {**_SIGLIP, "image_size": 384},
        },
        640,
        480,
    ),
    _wide(
        "Aya Vision",
        {
            **{"model_type": "aya_vision", "image_token_index": IMAGE_TOKEN},
            **{"downsample_factor": 2, "alignment_intermediate_size": 512},
            "text_config": {**_TEXT, "model_type": "cohere2", "num_hidden_layers": 4},
            "vision_config": {**_SIGLIP, "image_size": 364},
        },
        640,
        480,
    ),
    _wide(
        "Idefics2",
        {
            **{"model_type": "idefics2", "image_token_id": IMAGE_TOKEN, "vocab_size": 8000},
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {
                **_TOWER,
                "model_type": "idefics2",
                "patch_size": 14,
                "image_size": 980,
            },
            "perceiver_config": {
                **{"model_type": "idefics2", "num_key_value_heads": 2, "resampler_depth": 2},
                **{"resampler_head_dim": 32, "resampler_n_heads": 4, "resampler_n_latents": 64},
            },
        },
        640,
        480,
    ),
    _wide(
        "Kimi K2.5",
        {
            **{"model_type": "kimi_k25", "media_placeholder_token_id": IMAGE_TOKEN},
            "text_config": {
                **{**_TEXT, "model_type": "deepseek_v3", "kv_lora_rank": 64, "q_lora_rank": 64},
                **{"qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32},
            },
            "vision_config": {
                **{"model_type": "moonvit", "depth": 3, "embed_dim": 128, "hidden_size": 128},
                **{"num_heads": 4, "intermediate_size": 384},
            },
        },
        640,
        480,
    ),
    _wide(
        "PaddleOCR-VL",
        {
            **{"model_type": "paddleocr_vl", **_TEXT, **_QWEN_TOKENS, "use_bias": False},
            "hidden_size": 1024,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            "vision_config": {
                **{**_TOWER, "model_type": "paddleocr_vl", "patch_size": 14, "image_size": 384},
            },
        },
        640,
        480,
    ),
    _wide(
        "Hunyuan-VL",
        {
            **{"model_type": "hunyuan_vl", **_TEXT, "image_token_id": IMAGE_TOKEN},
            "rope_scaling": {
                **{"alpha": 1000.0, "factor": 1.0, "type": "xdrope"},
                "xdrope_section": [8, 8, 8, 8],
            },
            "vision_config": {**_TOWER, "out_hidden_size": 256, "patch_size": 16},
        },
        640,
        480,
    ),
    _wide(
        "Molmo2",
        {
            **{"model_type": "molmo2", "image_end_token_id": 7003, "image_patch_id": IMAGE_TOKEN},
            "text_config": {**_TEXT, "model_type": "molmo2"},
            "vision_config": {
                "vit_config": {**_MOLMO2, "num_hidden_layers": 3},
                "adapter_config": {**_MOLMO2, "text_hidden_size": 256, "vit_layers": [-1, -2]},
            },
        },
        640,
        480,
    ),
    # Gathers of matrices are in float32 on the CPU.
    _wide("DiffusionGemma", DIFFUSION_GEMMA, 640, 480, dtype="F32"),
    _wide(
        "nanoLLaVA",
        {
            **_QWEN2,
            **{"model_type": "llava-qwen2", "mm_hidden_size": 128, "auto_map": {}},
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        },
        640,
        480,
    ),
)
# Of 300 million parameters whatever the config says: MLX's CPU backend takes many minutes.
GEMMA3N = _wide(
    "Gemma 3n",
    {
        **{"model_type": "gemma3n", "image_token_id": IMAGE_TOKEN},
        "image_token_index": IMAGE_TOKEN,
        "text_config": {
            **{**_TEXT, "intermediate_size": [512] * 2, "model_type": "gemma3n_text"},
            **{"vocab_size_per_layer_input": 8000, "hidden_size_per_layer_input": 32},
            **{"num_kv_shared_layers": 0, "sliding_window": 512, "altup_num_inputs": 2},
            **{"laurel_rank": 16, "activation_sparsity_pattern": [0.0, 0.0]},
            **{"rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0},
            "layer_types": ["sliding_attention", "full_attention"],
            **{"altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True},
        },
        "vision_config": {"model_type": "gemma3n_vision", "vocab_offset": 7000},
        "audio_config": {
            **{"model_type": "gemma3n_audio", "hidden_size": 64, "vocab_offset": 7500},
            **{"conf_num_attention_heads": 4, "conf_num_hidden_layers": 2},
        },
    },
    640,
    480,
)


# Its images see one another, so that a prompt of any length is one call.
GEMMA4 = _wide(
    "Gemma 4",
    {
        **{"model_type": "gemma4", "image_token_id": IMAGE_TOKEN, "vocab_size": 8000},
        "text_config": {
            **_TEXT,
            **{"model_type": "gemma4_text", "global_head_dim": 128, "num_hidden_layers": 3},
            **{"sliding_window": 256, "use_bidirectional_attention": "vision"},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 8000},
            **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    **{"partial_rotary_factor": 0.25, "rope_theta": 1e6},
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        "vision_config": {
            **{"model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 2},
            **{"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
            **{"head_dim": 32, "global_head_dim": 32, "patch_size": 16},
            **{"position_embedding_size": 1024, "pooling_kernel_size": 3},
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        },
    },
    512,
    384,
)._replace(text_tokens=900, prefill_step=256)
