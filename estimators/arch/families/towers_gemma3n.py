"""Towers of Gemma 3n: MobileNetV5 and a conformer.

Source: mlx_vlm/models/gemma3n, vision.py, audio.py and config.py. mlx-lm builds none of them.
"""

from collections.abc import Iterator

from memfit.estimators.arch.families.towers import dense, repeated, rms_norms, tower_layers, weight
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Module, Modules, under

_STEM, _EDGE, _FUSED = 64, 128, 2048
# vision.py, gemma3n_mobilenet_def: stages of inverted residuals, each with the kernels of its first
# and its middle convolution and its expansion, and of attention with one head of keys, by heads,
# their width, and the stride of keys and values.
_Inverted = tuple[int, int, int]
_Attention = tuple[int, int, int]
_STAGES: tuple[tuple[int, tuple[_Inverted, ...], _Attention | None, int], ...] = (
    (256, ((3, 5, 6), (5, 0, 4), (3, 0, 4), (5, 0, 4), (3, 0, 4)), None, 0),
    (640, ((5, 5, 6), *((5, 0, 4),) * 7, (0, 0, 1)), (12, 64, 2), 14),
    (1280, ((5, 5, 6),), (16, 96, 1), 19),
)


def mobilenet(section: Fields, root: Fields, hidden: int) -> Modules:
    """MobileNetV5 with a fusion of its last two stages; the config does not shape it."""
    stem = (weight("conv", _STEM, 3, 3, 3, bias=_STEM), *rms_norms(_STEM, "bn"))
    tower = (
        *under("conv_stem", stem),
        *under("blocks.0.0", _edge(_STEM)),
        *under("blocks.0.1", _edge(_EDGE)),
        *under("blocks.0.2", _edge(_EDGE)),
        *_stages(),
        *under("msfa.ffn", _inverted(640 + 1280, _FUSED, (0, 0, 2), scales=False)),
        *rms_norms(_FUSED, "msfa.norm"),
    )
    width = section.count("hidden_size", _FUSED)
    section.ignore("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_classes")
    section.ignore("patch_size", "image_size", "num_channels")
    return (
        *under("vision_tower.timm_model", tower),
        *under("embed_vision", _embedder(section, width, hidden)),
    )


def _stages() -> Iterator[Module]:
    inputs = _EDGE
    for stage, (outputs, inverted, attention, count) in enumerate(_STAGES, 1):
        blocks = []
        for block in inverted:
            blocks.append(_inverted(inputs, outputs, block))
            inputs = outputs
        for _ in range(count):
            assert attention is not None
            blocks += [_attention(outputs, *attention), _inverted(outputs, outputs, (0, 0, 2))]
        for index, modules in enumerate(blocks):
            yield from under(f"blocks.{stage}.{index}", modules)


def _inverted(inputs: int, outputs: int, block: _Inverted, *, scales: bool = True) -> Modules:
    """Convolutions of each channel around one that widens and one that narrows."""
    first, middle, expansion = block
    inner = inputs * expansion
    convolutions = (
        ("dw_start", inputs, first, 1),
        ("pw_exp", inner, 1, inputs),
        ("dw_mid", inner, middle, 1),
        ("pw_proj", outputs, 1, inner),
    )
    modules: Modules = ()
    for name, channels, kernel, read in convolutions:
        if kernel:
            convolution = weight(f"{name}.conv", channels, kernel, kernel, read)
            modules += (convolution, *rms_norms(channels, f"{name}.bn"))
    return (*modules, weight("layer_scale.gamma", outputs)) if scales else modules


def _attention(width: int, heads: int, head_dim: int, stride: int) -> Modules:
    pooled: Modules = ()
    if stride > 1:
        pooled = (weight("down_conv", width, 3, 3, 1), *rms_norms(width, "norm"))
    narrow = (*pooled, weight("proj", head_dim, 1, 1, width))
    return (
        *rms_norms(width, "norm"),
        weight("attn.query.proj", heads * head_dim, 1, 1, width),
        *under("attn.key", narrow),
        *under("attn.value", narrow),
        weight("attn.output.proj", width, 1, 1, heads * head_dim),
        weight("layer_scale.gamma", width),
    )


def audio(section: Fields, root: Fields, hidden: int) -> Modules:
    """A conformer behind two convolutions with strides of 2."""
    width = section.count("hidden_size", 1536)
    heads = section.count("conf_num_attention_heads", 8)
    first, second = section.counts("sscp_conv_channel_size", 2) or (128, 32)
    bands = section.count("input_feat_size", 80)
    for _ in range(2):
        bands = (bands - 1) // 2 + 1  # one more on each side of a kernel of 3
    section.ignore("conf_attention_chunk_size", "conf_attention_context_left")
    section.ignore("conf_attention_context_right", "conf_positional_bias_size")
    section.ignore("conf_reduction_factor", "sscp_conv_kernel_size", "sscp_conv_stride_size")
    section.ignore("conf_attention_logit_cap", "conf_attention_invalid_logits_value")
    block = _conformer(width, heads, section.count("conf_conv_kernel_size", 5))
    projection = (
        weight("conv_0.conv", first, 3, 3, 1),
        *rms_norms(first, "conv_0.norm"),
        weight("conv_1.conv", second, 3, 3, first),
        *rms_norms(second, "conv_1.norm"),
        dense("input_proj_linear", bands * second, width, bias=False),
    )
    tower = (
        *under("subsample_conv_projection", projection),
        *repeated("conformer", tower_layers(section, "conf_num_hidden_layers", 12), block),
    )
    return (
        *under("audio_tower", tower),
        *under("embed_audio", _embedder(section, width, hidden)),
    )


def _edge(inputs: int) -> Modules:
    return (
        weight("conv_exp", 4 * inputs, 3, 3, inputs),
        *rms_norms(4 * inputs, "bn1"),
        weight("conv_pwl", _EDGE, 1, 1, 4 * inputs),
        *rms_norms(_EDGE, "bn2"),
    )


def _embedder(section: Fields, width: int, hidden: int) -> Modules:
    section.ignore("vocab_offset")
    return (
        weight("embedding", section.count("vocab_size", 128), width),
        *rms_norms(width, "hard_embedding_norm", "soft_embedding_norm"),
        dense("embedding_projection", width, hidden, bias=False),
    )


def _conformer(width: int, heads: int, kernel: int) -> Modules:
    inner = width // heads * heads
    feed_forward = (
        *rms_norms(width, "pre_layer_norm", "post_layer_norm"),
        dense("ffw_layer_1", width, 4 * width, bias=False),
        dense("ffw_layer_2", 4 * width, width, bias=False),
    )
    attention = (
        *(dense(f"attn.{name}_proj", width, inner, bias=False) for name in "qkv"),
        dense("attn.relative_position_embedding.pos_proj", width, inner, bias=False),
        weight("attn.per_dim_scale", width // heads),
        dense("post", inner, width, bias=False),
        *rms_norms(width, "pre_attn_norm", "post_norm"),
    )
    convolution = (
        *rms_norms(width, "pre_layer_norm", "conv_norm"),
        dense("linear_start", width, 2 * width, bias=False),
        dense("linear_end", width, width, bias=False),
        weight("depthwise_conv1d", width, kernel, 1),
    )
    return (
        *under("ffw_layer_start", feed_forward),
        *under("ffw_layer_end", feed_forward),
        *under("attention", attention),
        *under("lconv1d", convolution),
        *rms_norms(width, "norm"),
    )
