"""Plans of classes of dense layers."""

from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.plan_sizes import (
    FULL,
    GROUPED,
    HEAD_DIMS,
    HEADS,
    PACKED_WIDTHS,
    SLIDING,
    SPLIT_WIDTHS,
    WIDTHS,
    WINDOWED,
    WINDOWED_LAYERS,
    WINDOWS,
    same_names,
)

# n_embd and n_head, where nothing else has the config's own widths.
_SPLIT_EMBEDDING = {
    "n_embd n_head": SPLIT_WIDTHS,
    "vocab_size": range(300, 900, 7),
}
_SPLIT_DIMS = same_names({"n_embd": 1, "n_head": 1, "vocab_size": 1}, head_dim="n_embd//n_head")
_DIVIDES = "n_embd % n_head == 0"
_ALONE = RecordedAttention("n_head", "n_head", "head_dim", "head_dim")

DENSE = (
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
            "model_type": "lille-130m",
            "n_layer": 5,
            "block_size": 512,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        },
        dims={
            **_SPLIT_DIMS,
            "n_kv_heads": "n_kv_heads",
            "kv_width": "n_embd//n_head*n_kv_heads",
            # 256 * round(int(8*n_embd/3) / 256), where it is no half.
            "intermediate_size": "((8*n_embd//3 + 128)//256)*256",
        },
        draws={**_SPLIT_EMBEDDING, "n_kv_heads": (2, 4)},
        layer_count="n_layer",
        guards=(_DIVIDES, "8*n_embd//3 % 256 != 128"),
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
        guards=(_DIVIDES, "rotary_dim < head_dim"),
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
            "n_embd n_head": (*SPLIT_WIDTHS, (2304, 36), (3072, 48), (4608, 36), (6144, 48)),
            "vocab_size": range(300, 900, 7),
            "n_inner": range(128, 960, 16),
            "n_positions": range(512, 9000, 64),
        },
        packed_draws={"n_inner": range(128, 960, 64)},
        layer_count="n_layer",
        guards=(_DIVIDES,),
        attention=(_ALONE._replace(kv_heads="1"),),
    ),
    ClassPlan(
        base={
            "model_type": "spark2_5",
            "num_hidden_layers": 12,
            "layer_types": WINDOWED_LAYERS,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                FULL: {"partial_rotary_factor": 0.25, "rope_theta": 5e6},
                SLIDING: {"partial_rotary_factor": 1.0, "rope_theta": 10000.0},
            },
        },
        dims={
            **same_names(WIDTHS, HEADS, HEAD_DIMS, W="sliding_window"),
            # What of a head is rotated (spark2_5.py, _make_rope).
            "quarters": f"1 if 4*rope_parameters['{FULL}']['partial_rotary_factor'] == 1 else 2",
            "wholes": f"1 if rope_parameters['{SLIDING}']['partial_rotary_factor'] == 1 else 2",
        },
        draws={
            **WIDTHS,
            **HEADS,
            "num_key_value_heads": (1, 2, 4),
            # Both published sizes have these heads, which Metal fuses for one token alone.
            "head_dim": (256,),
            **WINDOWS,
        },
        packed_draws={**PACKED_WIDTHS},
        kinds=("layer_types[i]",),
        guards=("quarters == 1", "wholes == 1"),
        attention=(GROUPED, WINDOWED),
    ),
    ClassPlan(
        base={
            "model_type": "muse_glimmer",
            "num_hidden_layers": 12,
            "layer_types": WINDOWED_LAYERS,
        },
        dims=same_names(WIDTHS, HEADS, HEAD_DIMS, W="sliding_window"),
        draws={**WIDTHS, **HEADS, **HEAD_DIMS, **WINDOWS},
        packed_draws={**PACKED_WIDTHS},
        kinds=(
            "layer_types[i]",
            # Where nothing says so, full attention has no positions (muse_glimmer.py, ModelArgs).
            f"layer_rope_theta[i] > 0 if layer_rope_theta else layer_types[i] != '{FULL}'",
        ),
        attention=(GROUPED, WINDOWED),
    ),
)
