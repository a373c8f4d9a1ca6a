"""Vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Source: transformers models/qwen2_vl, qwen2_5_vl and qwen3_vl; absent keys take the defaults of
its config classes. mlx-lm builds none of them.
"""

from collections.abc import Callable

from memfit.estimators.arch.families.towers import (
    dense,
    fused_attention,
    layer_norms,
    plain_mlp,
    repeated,
    rms_norms,
    tower_layers,
    weight,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Module, Modules, gated_mlp, under

_UNSHAPING = ("num_heads", "spatial_patch_size", "tokens_per_second", "window_size")


def qwen2_vl(section: Fields, root: Fields, hidden: int) -> Modules:
    """LayerNorms and a plain MLP; the merger ends at the text model's width."""
    width = section.count("embed_dim", 1280)
    block = (
        *layer_norms(width, "norm1", "norm2"),
        *fused_attention(width),
        *plain_mlp(width, int(width * section.number("mlp_ratio", 4))),
    )
    return _qwen2_tower(section, block, width, layer_norms, section.count("hidden_size", 3584))


def qwen2_5_vl(section: Fields, root: Fields, hidden: int) -> Modules:
    """RMSNorms and a gated MLP."""
    width = section.count("hidden_size", 3584)
    block = (
        *rms_norms(width, "norm1", "norm2"),
        *fused_attention(width),
        *under("mlp", gated_mlp(width, section.count("intermediate_size", 3420), bias=True)),
    )
    section.ignore("fullatt_block_indexes")
    return _qwen2_tower(section, block, width, rms_norms, section.count("out_hidden_size", 3584))


def _qwen2_tower(
    section: Fields, block: Modules, width: int, norms: Callable[..., Modules], out: int
) -> Modules:
    """Patches, equal blocks and a merger, normed as the blocks are."""
    section.ignore(*_UNSHAPING)
    merged = _merged(section, width)
    tower = (
        _patches(section, width, 14),
        *repeated("blocks", tower_layers(section, "depth", 32), block),
        *norms(width, "merger.ln_q"),
        dense("merger.mlp.0", merged, merged),
        dense("merger.mlp.2", merged, out),
    )
    return under("vision_tower", tower)


def qwen3_vl(section: Fields, root: Fields, hidden: int) -> Modules:
    """Learned positions, and a merger of its own for each layer that feeds the text model."""
    width = section.count("hidden_size", 1152)
    intermediate = section.count("intermediate_size", 4304)
    block = (
        *layer_norms(width, "norm1", "norm2"),
        *fused_attention(width),
        *plain_mlp(width, intermediate, prefix="mlp.linear_"),
    )
    section.ignore(*_UNSHAPING)
    depth = tower_layers(section, "depth", 27)
    fed = section.counts("deepstack_visual_indexes", least=0)
    if fed is not None and len(fed) > depth:
        raise section.fail("deepstack_visual_indexes", f"{len(fed)} entries for {depth} layers")
    merged, out = _merged(section, width), section.count("out_hidden_size", 3584)
    merger = (dense("linear_fc1", merged, merged), dense("linear_fc2", merged, out))
    tower = (
        _patches(section, width, 16, bias=width),
        weight("pos_embed", section.count("num_position_embeddings", 2304), width),
        *repeated("blocks", depth, block),
        *under("merger", layer_norms(width, "norm") + merger),
        *repeated(
            "deepstack_merger_list",
            3 if fed is None else len(fed),
            layer_norms(merged, "norm") + merger,
        ),
    )
    return under("vision_tower", tower)


def _patches(section: Fields, width: int, default_size: int, *, bias: int = 0) -> Module:
    size = section.count("patch_size", default_size)
    channels = section.count("in_channels", section.count("in_chans", 3))
    frames = section.count("temporal_patch_size", 2)
    return weight("patch_embed.proj", width, frames, size, size, channels, bias=bias)


def _merged(section: Fields, width: int) -> int:
    """Width of the patches that the merger joins."""
    return width * section.count("spatial_merge_size", 2) ** 2
