"""Vision towers of Llama 3.2 and 4, LLaVA (CLIP), InternVL and of Mistral's models (Pixtral).

Source: transformers models/llama4, pixtral, mistral3, llava and clip, mlx_vlm/models/mllama and
internvl_chat; absent keys take the defaults of their config classes. mlx-lm builds none of them.
"""

from memfit.estimators.arch.families.towers import (
    dense,
    layer_norms,
    plain_mlp,
    projections,
    repeated,
    rms_norms,
    tower_layers,
    vision_transformer,
    weight,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Module, Modules, Part, gated_mlp, linear, under


def llama4(section: Fields, root: Fields, hidden: int) -> Modules:
    """A class token and learned positions; the adapter works on shuffled patches."""
    width = section.count("hidden_size", 768)
    intermediate = section.count("intermediate_size", 5632)
    heads = section.count("num_attention_heads", 16)
    size = section.count("patch_size", 14)
    block = (
        *layer_norms(width, "input_layernorm", "post_attention_layernorm"),
        *under("self_attn", projections(width, width // heads * heads)),
        *plain_mlp(width, intermediate),
    )
    inner = section.count("projector_input_dim", 4096)
    out = section.count("projector_output_dim", 4096)
    positions = (section.count("image_size", 448) // size) ** 2 + 1
    channels = section.count("num_channels", 3)
    layers = tower_layers(section, "num_hidden_layers", 34)
    section.ignore("vision_feature_layer", "multi_modal_projector_bias")
    tower = (
        weight("class_embedding", width),
        weight("positional_embedding_vlm", positions, width),
        dense("patch_embedding.linear", channels * size**2, width, bias=False),
        *layer_norms(width, "layernorm_pre", "layernorm_post"),
        *repeated("model.layers", layers, block),
        dense("vision_adapter.mlp.fc1", intermediate, inner, bias=False),
        dense("vision_adapter.mlp.fc2", out, out, bias=False),
    )
    seen = section.count("vision_output_dim", 7680)
    return (
        *under("vision_model", tower),
        dense("multi_modal_projector.linear_1", seen, hidden, bias=False),
    )


def mllama(section: Fields, root: Fields, hidden: int) -> Modules:
    """Tiles with positions of their own; a second stack of blocks is gated."""
    width = section.count("hidden_size", 1280)
    intermediate = section.count("intermediate_size", 5120)
    size, tiles = section.count("patch_size", 14), section.count("max_num_tiles", 4)
    ratios = section.count("max_aspect_ratio_id", 8) + 1
    patches = (section.count("image_size", 560) // size) ** 2 + 1
    block = (
        *layer_norms(width, "input_layernorm", "post_attention_layernorm"),
        *under("self_attn", projections(width, width, bias=False)),
        *plain_mlp(width, intermediate),
    )
    gated = (*block, weight("gate_attn", 1), weight("gate_ffn", 1))
    layers, more = (
        tower_layers(section, key, default)
        for key, default in (("num_hidden_layers", 32), ("num_global_layers", 8))
    )
    tile_positions = (weight("embedding", ratios, tiles * width), weight("gate", 1))
    positions = "gated_positional_embedding"
    section.ignore("intermediate_layers_indices", "attention_heads", "num_attention_heads")
    section.ignore("supported_aspect_ratios")
    tower = (
        weight("patch_embedding", width, size, size, section.count("num_channels", 3)),
        weight("class_embedding", width),
        weight(f"{positions}.gate", 1),
        weight(f"{positions}.embedding", patches, width),
        weight(f"{positions}.tile_embedding", ratios, tiles * patches * width),
        *under("pre_tile_positional_embedding", tile_positions),
        *under("post_tile_positional_embedding", tile_positions),
        *layer_norms(width, "layernorm_pre", "layernorm_post"),
        *repeated("transformer.layers", layers, block),
        *repeated("global_transformer.layers", more, gated),
    )
    seen = section.count("vision_output_dim", 7680)
    return (*under("vision_tower", tower), dense("multi_modal_projector", seen, hidden))


def intern_vit(section: Fields, root: Fields, hidden: int) -> Modules:
    """InternViT; what follows it is packed with the text model."""
    width, size = section.count("hidden_size", 1024), _side(section, "patch_size", 14)
    intermediate = section.count("intermediate_size", 4096)
    norms = rms_norms if section.text("norm_type", "layer_norm") == "rms_norm" else layer_norms
    block = (
        *norms(width, "norm1", "norm2"),
        dense("attn.qkv", width, 3 * width, bias=section.flag("qkv_bias", True)),
        dense("attn.proj", width, width),
        *plain_mlp(width, intermediate),
        weight("ls1", width),
        weight("ls2", width),
    )
    if section.flag("qk_normalization", False):
        block += rms_norms(width, "attn.q_norm", "attn.k_norm")
    section.ignore("num_attention_heads", "num_channels", "use_flash_attn")
    root.ignore("vocab_size", "hidden_size", "force_image_size", "dynamic_image_size")
    root.ignore("max_dynamic_patch", "min_dynamic_patch", "select_layer")
    positions = (_side(section, "image_size", 448) // size) ** 2 + 1
    tower = (
        weight("embeddings.class_embedding", width),
        weight("embeddings.patch_embedding", width, size, size, 3, bias=width),
        weight("embeddings.position_embedding", positions, width),
        *repeated("encoder.layers", tower_layers(section, "num_hidden_layers", 24), block),
    )
    ratio = root.number("downsample_ratio", 0.5)
    if not 1 / size <= ratio <= 1:
        raise root.fail("downsample_ratio", f"expected 1/{size} to 1, got {ratio}")
    merged = width * int(1 / ratio) ** 2
    adapter = (
        Module("mlp1.0", (merged,), Part.OTHER, merged),
        linear("mlp1.1", merged, hidden, Part.OTHER, bias=True),
        linear("mlp1.3", hidden, hidden, Part.OTHER, bias=True),
    )
    return (*under("vision_model", tower), *adapter)


def _side(section: Fields, key: str, default: int) -> int:
    """A size that may be a list of two."""
    both = section.counts(key) if section.is_list(key) else None
    return both[0] if both else section.count(key, default)


def mistral3(section: Fields, root: Fields, hidden: int) -> Modules:
    """Pixtral, with a projector that merges neighbouring patches."""
    width = section.count("hidden_size", 1024)
    merged = width * root.count("spatial_merge_size", 2) ** 2
    bias = root.flag("multimodal_projector_bias", False)
    projector = (
        *rms_norms(width, "norm"),
        dense("patch_merger.merging_layer", merged, width, bias=False),
        dense("linear_1", width * _features(root), hidden, bias=bias),
        dense("linear_2", hidden, hidden, bias=bias),
    )
    return _pixtral(section, width) + under("multi_modal_projector", projector)


def llava(section: Fields, root: Fields, hidden: int) -> Modules:
    """Pixtral, with LLaVA's projector."""
    width = section.count("hidden_size", 1024)
    return _pixtral(section, width) + _projector(width * _features(root), root, hidden)


def clip(section: Fields, root: Fields, hidden: int) -> Modules:
    """CLIP, with LLaVA's projector."""
    section.ignore("projection_dim", "vocab_size")
    root.ignore("ignore_index", "vocab_size")
    tower = vision_transformer(section, 32, is_clip=True)
    width = section.count("hidden_size", 768) * _features(root)
    return under("vision_tower.vision_model", tower) + _projector(width, root, hidden)


def _projector(width: int, root: Fields, hidden: int) -> Modules:
    bias = root.flag("multimodal_projector_bias", True)
    layers = (
        dense("linear_1", width, hidden, bias=bias),
        dense("linear_2", hidden, hidden, bias=bias),
    )
    return under("multi_modal_projector", layers)


def _pixtral(section: Fields, width: int) -> Modules:
    size = section.count("patch_size", 16)
    heads = section.count("num_attention_heads", 16)
    mlp = gated_mlp(width, section.count("intermediate_size", 4096))
    block = (
        *rms_norms(width, "attention_norm", "ffn_norm"),
        *under("attention", projections(width, width // heads * heads, bias=False)),
        *under("feed_forward", mlp),
    )
    section.ignore("image_size", "head_dim", "vocab_size", "projection_dim")
    tower = (
        weight("patch_conv", width, size, size, section.count("num_channels", 3)),
        *rms_norms(width, "ln_pre"),
        *repeated("transformer.layers", tower_layers(section, "num_hidden_layers", 24), block),
    )
    return under("vision_tower", tower)


def _features(root: Fields) -> int:
    """How many layers' outputs the projector sees side by side: one, unless a list names them."""
    layers = root.unread().get("vision_feature_layer")
    return max(len(layers), 1) if isinstance(layers, list) else 1
