"""Vision towers of GLM-4V and GLM-OCR.

Source: mlx_vlm/models/glm4v, glm4v_moe and glm_ocr, config.py and vision.py. mlx-lm builds none.
"""

from memfit.estimators.arch.families.towers import (
    dense,
    fused_attention,
    layer_norms,
    repeated,
    rms_norms,
    tower_layers,
    weight,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Modules, gated_mlp, under

_UNSHAPING = ("num_heads", "window_size", "image_size")


def glm4v(section: Fields, root: Fields, hidden: int) -> Modules:
    """Learned positions; the config's widths of blocks and merger are exchanged in the class."""
    width, out = section.count("hidden_size"), section.count("out_hidden_size", 4096)
    block = (
        *rms_norms(width, "norm1", "norm2"),
        *fused_attention(width, bias=False),
        *under("mlp", gated_mlp(width, out)),
    )
    section.ignore("attention_bias")
    positions = (section.count("image_size", 336) // section.count("patch_size", 14)) ** 2
    more = (
        *rms_norms(width, "post_conv_layernorm"),
        weight("embeddings.position_embedding", positions, width),
    )
    return _tower(section, block, out, section.count("intermediate_size"), more)


def glm_ocr(section: Fields, root: Fields, hidden: int) -> Modules:
    """Queries and keys are normed; no learned positions."""
    width, out = section.count("hidden_size", 1024), section.count("out_hidden_size", 1536)
    bias = section.flag("attention_bias", True)
    head_dim = width // section.count("num_heads", 16)
    block = (
        *rms_norms(width, "norm1", "norm2"),
        *rms_norms(head_dim, "attn.q_norm", "attn.k_norm"),
        *fused_attention(width, bias=bias),
        *under("mlp", gated_mlp(width, section.count("intermediate_size", 4096), bias=bias)),
    )
    return _tower(section, block, out, out * section.count("in_channels", 3))


def _tower(
    section: Fields, block: Modules, out: int, merger_width: int, more: Modules = ()
) -> Modules:
    section.ignore(*_UNSHAPING)
    width, size = section.count("hidden_size", 1024), section.count("patch_size", 14)
    frames, channels = section.count("temporal_patch_size", 2), section.count("in_channels", 3)
    side = section.count("spatial_merge_size", 2)
    tower = (
        weight("patch_embed.proj", width, frames, size, size, channels, bias=width),
        *more,
        *repeated("blocks", tower_layers(section, "depth", 24), block),
        *rms_norms(width, "post_layernorm"),
        weight("downsample", out, side, side, width, bias=out),
        dense("merger.proj", out, out, bias=False),
        *layer_norms(out, "merger.post_projection_norm"),
        *under("merger", gated_mlp(out, merger_width)),
    )
    return under("vision_tower", tower)
