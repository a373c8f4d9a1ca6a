"""Further plans, as those of plans.py."""

from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.plan_sizes import (
    EXPERTS,
    FULL,
    GROUPED,
    HEAD_DIMS,
    HEADS,
    PACKED_EXPERTS,
    PACKED_WIDTHS,
    SEVERAL_EXPERTS,
    SLIDING,
    SORTED,
    SPLIT_WIDTHS,
    WIDTHS,
    WINDOWED,
    same_names,
)

_LLLF = [SLIDING, SLIDING, SLIDING, FULL] * 3
_ROPES = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in (FULL, SLIDING)}
_WINDOWS = (128, 256, 512, 768, 1024)
# n_embd and n_head, where nothing else has the config's own widths.
_SPLIT_EMBEDDING = {
    "n_embd n_head": SPLIT_WIDTHS,
    "vocab_size": range(300, 900, 7),
}
_SPLIT_DIMS = same_names({"n_embd": 1, "n_head": 1, "vocab_size": 1}, head_dim="n_embd//n_head")
_ALONE = RecordedAttention("n_head", "n_head", "head_dim", "head_dim")

MORE = (
    ClassPlan(
        base={
            "model_type": "nanbeige",
            "num_hidden_layers": 5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 7e7,
            "max_position_embeddings": 4096,
        },
        dims=same_names(
            WIDTHS,
            HEADS,
            head_dim="head_dim or hidden_size//num_attention_heads",
        ),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS},
        packed_draws={**PACKED_WIDTHS},
        attention=(GROUPED,),
    ),
    ClassPlan(
        base={
            "model_type": "spark2_5",
            "num_hidden_layers": 12,
            "layer_types": _LLLF,
            "rope_parameters": _ROPES,
            "max_position_embeddings": 4096,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS, W="sliding_window"),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS, "sliding_window": _WINDOWS},
        packed_draws={**PACKED_WIDTHS},
        kinds=("layer_types[i]",),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "plamo3",
            "num_hidden_layers": 12,
            "sliding_window_pattern": 4,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS, W="sliding_window or window_size"),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS, "window_size": _WINDOWS},
        packed_draws={**PACKED_WIDTHS},
        kinds=("(i + 1) % sliding_window_pattern == 0",),
        features=("M1 + L > W + 1",),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "mellum",
            "num_hidden_layers": 12,
            "layer_types": _LLLF,
            "rope_parameters": _ROPES,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "norm_topk_prob": True,
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
        guards=(SEVERAL_EXPERTS,),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "lille-130m",
            "n_layer": 5,
            "block_size": 512,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        },
        dims={
            **_SPLIT_DIMS,
            "n_kv_heads": "n_kv_heads",
            # 256 * round(int(8*n_embd/3) / 256): halves come from no such width.
            "intermediate_size": "((8*n_embd//3 + 128)//256)*256",
        },
        draws={**_SPLIT_EMBEDDING, "n_kv_heads": (2, 4)},
        layer_count="n_layer",
        attention=(_ALONE._replace(kv_heads="n_kv_heads"),),
    ),
    ClassPlan(
        base={"model_type": "gptj", "n_layer": 5},
        dims={**_SPLIT_DIMS, "rotary_dim": "rotary_dim or n_embd//n_head"},
        # GPT-J 6B has heads of 256.
        draws={
            "n_embd n_head": (*SPLIT_WIDTHS, (1024, 4), (1536, 6), (2048, 8)),
            "vocab_size": range(300, 900, 7),
            "rotary_dim": (16, 24, 32, 48),
        },
        layer_count="n_layer",
        guards=("rotary_dim < head_dim",),
        attention=(_ALONE,),
    ),
    ClassPlan(
        base={
            "model_type": "gpt_bigcode",
            "n_layer": 5,
            "layer_norm_epsilon": 1e-5,
        },
        dims={**_SPLIT_DIMS, "n_inner": "n_inner", "n_positions": "n_positions"},
        draws={
            # StarCoder's 48 heads share one, too many for the kernel of a token.
            "n_embd n_head": (*SPLIT_WIDTHS, (2304, 36), (2560, 40), (3072, 48)),
            "vocab_size": range(300, 900, 7),
            "n_inner": range(128, 960, 16),
            "n_positions": range(512, 9000, 64),
        },
        packed_draws={"n_inner": range(128, 960, 64)},
        layer_count="n_layer",
        attention=(_ALONE._replace(kv_heads="1"),),
    ),
    ClassPlan(
        base={
            "model_type": "muse_glimmer",
            "num_hidden_layers": 12,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS, W="sliding_window"),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS, "sliding_window": _WINDOWS},
        packed_draws={**PACKED_WIDTHS},
        kinds=(
            f"layer_types[i] if layer_types else ('{FULL}' if i % 4 == 3 else '{SLIDING}')",
            "layer_rope_theta[i] > 0 if layer_rope_theta else"
            f" (layer_types[i] if layer_types else ('{FULL}' if i % 4 == 3 else '{SLIDING}'))"
            f" != '{FULL}'",
        ),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "phixtral",
            "num_layers": 5,
        },
        dims={
            **{n: n for n in ("num_vocab", "model_dim", "num_heads", "rotary_dim")},
            "num_experts_per_tok": "num_experts_per_tok",
            "num_local_experts": "num_local_experts",
            "head_dim": "model_dim//num_heads",
        },
        draws={
            # Phi-2's heads are of 80.
            "model_dim num_heads": (*SPLIT_WIDTHS, (320, 4), (640, 8), (960, 12), (1280, 16)),
            "num_vocab": range(300, 900, 7),
            "rotary_dim": (16, 32, 48),
            "num_experts_per_tok num_local_experts": tuple(
                (k, count) for k in (2, 3, 4) for count in (k, 5, 6, 8, 9)
            ),
        },
        layer_count="num_layers",
        # All experts are not cut out of all.
        features=(SORTED, "num_experts_per_tok == num_local_experts"),
        guards=(
            SEVERAL_EXPERTS,
            "num_experts_per_tok <= num_local_experts",
            "rotary_dim < head_dim",
        ),
        attention=(RecordedAttention("num_heads", "num_heads", "head_dim", "head_dim"),),
    ),
    ClassPlan(
        base={
            "model_type": "laguna",
            "num_hidden_layers": 12,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 3,
            "rope_parameters": _ROPES,
        },
        dims=same_names(
            WIDTHS,
            HEADS,
            HEAD_DIMS,
            EXPERTS,
            num_experts="num_experts",
            shared_expert_intermediate_size="shared_expert_intermediate_size",
            W="sliding_window",
        ),
        draws={
            **WIDTHS,
            **HEADS,
            **HEAD_DIMS,
            **EXPERTS,
            "num_experts": range(8, 40, 2),
            "shared_expert_intermediate_size": range(112, 480, 16),
            "sliding_window": _WINDOWS,
        },
        packed_draws={
            **PACKED_WIDTHS,
            **PACKED_EXPERTS,
            "shared_expert_intermediate_size": range(192, 640, 64),
        },
        kinds=(
            "layer_types[i]",
            "mlp_layer_types[i] == 'sparse' if mlp_layer_types else i > 0",
        ),
        features=(SORTED,),
        guards=(SEVERAL_EXPERTS,),
        attention=(GROUPED, WINDOWED),
    ),
)
