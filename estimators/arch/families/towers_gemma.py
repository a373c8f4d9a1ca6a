"""Vision and audio towers of Gemma 3 and 4.

Source: transformers models/siglip, gemma3, gemma4 and gemma4_unified; absent keys take the
defaults of its config classes. mlx-lm builds none of them.
"""

from memfit.estimators.arch.families.towers import (
    dense,
    layer_norms,
    plain_mlp,
    repeated,
    rms_norms,
    tower_layers,
    vision_transformer,
    weight,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Module, Modules, Part, sandwich_norms, under


def siglip(section: Fields, root: Fields, hidden: int) -> Modules:
    """SigLIP with Gemma 3's projector."""
    width = section.count("hidden_size", 768)
    intermediate = section.count("intermediate_size", 3072)
    tower = vision_transformer(section, 16)
    if section.flag("vision_use_head", True):
        tower += under("head", _pooling_head(width, intermediate))
    return (
        *under("vision_tower.vision_model", tower),
        weight("multi_modal_projector.mm_input_projection_weight", width, hidden),
        *rms_norms(width, "multi_modal_projector.mm_soft_emb_norm"),
    )


def gemma4_vision(section: Fields, root: Fields, hidden: int) -> Modules:
    """Gemma-like layers over patches, with learned positions for both axes."""
    width, head_dim = section.count("hidden_size", 768), section.count("head_dim", 64)
    queries = section.count("num_attention_heads", 12) * head_dim
    keys = section.count("num_key_value_heads", 12) * head_dim
    intermediate = section.count("intermediate_size", 3072)
    clipped = section.flag("use_clipped_linears", False)
    block = (
        *sandwich_norms(width),
        *rms_norms(head_dim, "self_attn.q_norm", "self_attn.k_norm"),
        *_clippable("self_attn.q_proj", width, queries, clipped),
        *_clippable("self_attn.k_proj", width, keys, clipped),
        *_clippable("self_attn.v_proj", width, keys, clipped),
        *_clippable("self_attn.o_proj", queries, width, clipped),
        *_clippable("mlp.gate_proj", width, intermediate, clipped),
        *_clippable("mlp.up_proj", width, intermediate, clipped),
        *_clippable("mlp.down_proj", intermediate, width, clipped),
    )
    section.ignore("global_head_dim", "pooling_kernel_size", "default_output_length", "layer_types")
    size = section.count("patch_size", 16)
    positions = section.count("position_embedding_size", 10240)
    tower = (
        dense("patch_embedder.input_proj", 3 * size**2, width, bias=False),
        weight("patch_embedder.position_embedding_table", 2, positions, width),
        *repeated("encoder.layers", tower_layers(section, "num_hidden_layers", 16), block),
    )
    if section.flag("standardize", False):
        tower += (weight("std_bias", width), weight("std_scale", width))
    return (*under("vision_tower", tower), _embedder("vision", width, hidden))


def gemma4_audio(section: Fields, root: Fields, hidden: int) -> Modules:
    """A conformer behind two convolutions over 128 mel bands."""
    width = section.count("hidden_size", 1024)
    heads = section.count("num_attention_heads", 8)
    clipped = section.flag("use_clipped_linears", True)
    block = _conformer(width, heads, section.count("conv_kernel_size", 5), clipped)
    first, second = section.counts("subsampling_conv_channels", 2) or (128, 32)
    section.ignore("attention_chunk_size", "attention_context_left", "attention_context_right")
    section.ignore("attention_invalid_logits_value", "attention_logit_cap")
    out = section.optional_count("output_proj_dims")
    if out is None and not section.null("output_proj_dims"):
        out = 1536
    tower = (
        weight("subsample_conv_projection.layer0.conv", first, 3, 3, 1),
        *rms_norms(first, "subsample_conv_projection.layer0.norm"),
        weight("subsample_conv_projection.layer1.conv", second, 3, 3, first),
        *rms_norms(second, "subsample_conv_projection.layer1.norm"),
        # Two strides of 2 leave 32 of the bands.
        dense("subsample_conv_projection.input_proj_linear", 32 * second, width, bias=False),
        *repeated("layers", tower_layers(section, "num_hidden_layers", 12), block),
    )
    if out is not None:
        tower += (dense("output_proj", width, out),)
    return (*under("audio_tower", tower), _embedder("audio", out or width, hidden))


def gemma4_unified_vision(section: Fields, root: Fields, hidden: int) -> Modules:
    """Patches go straight into the text model, without an encoder."""
    width = section.count("mm_embed_dim", 3840)
    side = section.count("patch_size", 16) * section.count("pooling_kernel_size", 3)
    pixels = 3 * section.count("model_patch_size", side) ** 2
    embedder = (
        *layer_norms(pixels, "patch_ln1"),
        dense("patch_dense", pixels, width),
        *layer_norms(width, "patch_ln2", "pos_norm"),
        weight("pos_embedding", section.count("mm_posemb_size", 1120), 2, width),
    )
    section.ignore("num_soft_tokens")
    out = section.count("output_proj_dims", 3840)
    return (*under("vision_embedder", embedder), _embedder("vision", out, hidden))


def gemma4_unified_audio(section: Fields, root: Fields, hidden: int) -> Modules:
    """Frames of samples go straight into the text model."""
    section.ignore("hidden_size", "output_proj_dims", "audio_samples_per_token")
    return (_embedder("audio", section.count("audio_embed_dim", 640), hidden),)


def _pooling_head(width: int, intermediate: int) -> Modules:
    return (
        weight("probe", 1, 1, width),
        weight("attention.in_proj", 3 * width, width, bias=3 * width),
        dense("attention.out_proj", width, width),
        *layer_norms(width, "layernorm"),
        *plain_mlp(width, intermediate),
    )


def _conformer(width: int, heads: int, kernel: int, clipped: bool) -> Modules:
    inner = width // heads * heads
    feed_forward = (
        *rms_norms(width, "pre_layer_norm", "post_layer_norm"),
        *_clippable("ffw_layer_1", width, 4 * width, clipped),
        *_clippable("ffw_layer_2", 4 * width, width, clipped),
    )
    return (
        *under("feed_forward1", feed_forward),
        *under("feed_forward2", feed_forward),
        *_clippable("self_attn.q_proj", width, inner, clipped),
        *_clippable("self_attn.k_proj", width, inner, clipped),
        *_clippable("self_attn.v_proj", width, inner, clipped),
        *_clippable("self_attn.post", width, width, clipped),
        dense("self_attn.relative_k_proj", width, inner, bias=False),
        weight("self_attn.per_dim_scale", width // heads),
        *rms_norms(width, "lconv1d.pre_layer_norm", "lconv1d.conv_norm"),
        *_clippable("lconv1d.linear_start", width, 2 * width, clipped),
        *_clippable("lconv1d.linear_end", width, width, clipped),
        weight("lconv1d.depthwise_conv1d", width, kernel, 1),
        *rms_norms(width, "norm_pre_attn", "norm_post_attn", "norm_out"),
    )


def _clippable(path: str, inputs: int, outputs: int, clipped: bool) -> Modules:
    """A Linear with, when clipped, the bounds of its inputs and outputs as four scalars."""
    bounds = ("input_min", "input_max", "output_min", "output_max") if clipped else ()
    scalars = tuple(Module(f"{path}.{bound}", (), Part.VISION) for bound in bounds)
    return (dense(f"{path}.linear", inputs, outputs, bias=False), *scalars)


def _embedder(kind: str, width: int, hidden: int) -> Module:
    return dense(f"embed_{kind}.embedding_projection", width, hidden, bias=False)
