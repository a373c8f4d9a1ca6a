"""Sizes that plans of many classes share: what is drawn, its names, and calls of attention."""

from collections.abc import Mapping
from typing import Any

from memfit.estimators.programs.graph import RecordedAttention

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


SLIDING, FULL = "sliding_attention", "full_attention"
# Three layers with a window, then one without.
WINDOWED_LAYERS = [SLIDING, SLIDING, SLIDING, FULL] * 3
WINDOWS = {"sliding_window": (128, 256, 512, 768, 1024)}
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
        **WINDOWS,
    },
    "packed_draws": {**PACKED_WIDTHS, **PACKED_EXPERTS},
}
