"""Which part of a model a tensor belongs to, by its name in MLX's or the Hub's layout."""

import re

from memfit.estimators.arch.modules import Part

# The first pattern that is found decides; order matters (shared experts before experts).
_RULES: tuple[tuple[Part, re.Pattern[str]], ...] = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (
            Part.VISION,
            r"(^|\.)(vision|visual|vit|audio|image|img|multi_modal|multimodal|mm_)[a-z_]*\.?"
            r"|embed_(vision|audio)|patch_merger|image_newline",
        ),
        (Part.NORM, r"(^|[._])(norm\d?|layernorm|ln_f|ln_\d|ln)(\.|$)|(layer_?norm|_norm)(\.|$)"),
        (Part.SHARED_EXPERTS, r"shared_(experts?|mlp)"),
        (Part.ROUTER, r"router|(^|\.)gate\.(weight|scales|biases|bias|wg|gate_proj)|\.gate\.e_sco"
         r"|expert_bias|e_score_correction_bias"),
        (Part.EXPERTS, r"experts?\.|experts?_|switch_(mlp|glu)|input_linear|output_linear"),
        (Part.HEAD, r"(^|\.)(lm_head|embed_out|output|head)\.[a-z_]+$"),
        (
            Part.EMBEDDING,
            r"(^|\.)(embed_tokens\w*|tok_embeddings|word_embeddings|wte|wpe|embed_in|embeddings?"
            r"|embed_positions)\.",
        ),
        (
            Part.ATTENTION,
            r"attn|attention|mixer|mamba|ssm|conv|temporal_block|time_mix|[._][qkvo]_proj|recurrent",
        ),
        (Part.MLP, r"mlp|feed_forward|ffn|channel_mix|feedforward|(gate|up|down)_proj|\.fc\d?\."),
    )
)


def part_of(name: str) -> Part:
    """Return the part a tensor's name speaks of; ``OTHER`` when no rule knows it.

    >>> part_of("model.layers.0.mlp.switch_mlp.up_proj.scales").value
    'experts'
    """
    for part, pattern in _RULES:
        if pattern.search(name):
            return part
    return Part.OTHER
