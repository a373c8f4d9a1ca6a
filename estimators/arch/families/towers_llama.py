"""Vision towers of Llama 4, LLaVA (CLIP) and of Mistral's models (Pixtral).

Source: transformers models/llama4, pixtral, mistral3, llava and clip; absent keys take the defaults
of its config classes. mlx-lm builds none of them.
"""

from memfit.estimators.arch.families.tower_blocks import (
    dense,
    layer_norms,
    projections,
    repeated,
    rms_norms,
    tower_layers,
    vision_transformer,
    weight,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.modules import Modules, gated_mlp, under


def llama4(section: Fields, root: Fields, hidden: int) -> Modules:
    """A class token and learned positions; the adapter works on shuffled patches."""
    width = section.count("hidden_size", 768)
    intermediate = section.count("intermediate_size", 5632)
    heads = section.count("num_attention_heads", 16)
    size = section.count("patch_size", 14)
    block = (
        *layer_norms(width, "input_layernorm", "post_attention_layernorm"),
        *under("self_attn", projections(width, width // heads * heads)),
        dense("mlp.fc1", width, intermediate),
        dense("mlp.fc2", intermediate, width),
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
