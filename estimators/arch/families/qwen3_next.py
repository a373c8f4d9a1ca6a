"""Qwen3-Next and Qwen3.5: gated delta nets with a gated full attention every few layers.

Source: mlx-lm models/qwen3_next.py; qwen3_5.py, which imports its attention and experts; and
qwen3_5_moe.py, which adds only a renaming of weights.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families import towers_qwen
from memfit.estimators.arch.families.towers import with_towers
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    ROUTER_8BIT,
    Layer,
    Model,
    Modules,
    Part,
    array,
    convolution,
    linear,
    norm,
    under,
)
from memfit.estimators.arch.registry import (
    DENSE,
    EXPERTS,
    GATE_UP,
    HEAD,
    NESTED,
    Cut,
    Irregular,
    VisionTraits,
    projections,
)
from memfit.estimators.arch.specs import GatedDelta
from memfit.estimators.checkpoint.kinds import MTP_HEAD

# mlx-lm TextModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "linear_num_value_heads": 64,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 192,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 0,
}


def _build_next(fields: Fields) -> Model:
    hidden = fields.count("hidden_size")
    delta = _delta_spec(fields)
    return blocks.decoder(
        fields,
        _delta_layers(fields, delta, _fused_modules(delta, hidden), _feed_forwards(fields)),
        blocks.ends(fields, tied=fields.flag("tie_word_embeddings", False)),
        makes_own_cache=True,
    )


def _feed_forwards(fields: Fields) -> list[blocks.FeedForwardBlock]:
    """Experts every ``decoder_sparse_step`` layers, but for the layers named dense."""
    step = fields.count("decoder_sparse_step")
    dense_layers = set(fields.counts("mlp_only_layers", least=0) or ())
    dense = _dense_block(fields)
    sparse = _experts_block(fields) if fields.count("num_experts", least=0) else dense
    return [
        dense if index in dense_layers or (index + 1) % step else sparse
        for index in range(fields.layers())
    ]


def _fused_modules(spec: GatedDelta, hidden: int) -> Modules:
    """Parameters of a gated delta net with its projections fused."""
    values = spec.value_heads * spec.value_dim
    return (
        linear("in_proj_qkvz", hidden, spec.conv_dim + values),
        linear("in_proj_ba", hidden, 2 * spec.value_heads),
        linear("out_proj", values, hidden),
        convolution("conv1d", spec.conv_dim, spec.kernel),
        array("dt_bias", (spec.value_heads,)),
        array("A_log", (spec.value_heads,)),
        norm("norm", spec.value_dim),
    )


def _build_qwen3_5(fields: Fields) -> Model:
    """Return the model of a ``qwen3_5`` or ``qwen3_5_moe`` config, with or without its wrapper."""
    text = _text_section(fields)
    delta = _delta_spec(text)
    feed_forward = (
        _experts_block(text) if text.count("num_experts", least=0) else _dense_block(text)
    )
    # Every layer is sparse or none is; the class ignores these two.
    text.ignore("decoder_sparse_step", "intermediate_size", "attn_output_gate")
    layers = _delta_layers(
        text,
        delta,
        _split_modules(delta, text.count("hidden_size")),
        [feed_forward] * text.layers(),
    )
    outside = blocks.ends(text, tied=text.flag("tie_word_embeddings", False))
    model = blocks.decoder(
        text,
        layers,
        under("language_model", outside),
        layers_path="language_model.model.layers",
        makes_own_cache=True,
    )
    towers = {fields.text("model_type"): towers_qwen.qwen3_vl}
    return with_towers(model, fields, towers, {})


def _text_section(fields: Fields) -> Fields:
    if fields.null("text_config"):
        raise fields.fail("text_config", "expected an object, got null")
    text = fields
    if fields.has("text_config"):
        text = fields.section("text_config")
        if not text.has("tie_word_embeddings"):
            fields.expect("tie_word_embeddings", False)
    text = text.with_overrides({}, _DEFAULTS)
    if text.has("head_dim"):
        return text
    head_dim = text.count("hidden_size") // text.count("num_attention_heads")
    return text.with_overrides({"head_dim": head_dim})


def _split_modules(spec: GatedDelta, hidden: int) -> Modules:
    """Parameters of a gated delta net with its projections split; the decay stays float32."""
    values = spec.value_heads * spec.value_dim
    return (
        linear("in_proj_qkv", hidden, spec.conv_dim),
        linear("in_proj_z", hidden, values),
        linear("in_proj_b", hidden, spec.value_heads),
        linear("in_proj_a", hidden, spec.value_heads),
        linear("out_proj", values, hidden),
        convolution("conv1d", spec.conv_dim, spec.kernel),
        array("dt_bias", (spec.value_heads,)),
        array("A_log", (spec.value_heads,), float32=True),
        norm("norm", spec.value_dim),
    )


def _delta_layers(
    fields: Fields,
    delta: GatedDelta,
    delta_modules: Modules,
    feed_forwards: Sequence[blocks.FeedForwardBlock],
) -> tuple[Layer, ...]:
    """Layers with the given feed-forward blocks; each ``full_attention_interval``-th attends."""
    hidden, full = fields.count("hidden_size"), _gated_attention(fields)
    linear_mixer = delta, under("linear_attn", delta_modules)
    return tuple(
        blocks.decoder_layer(full if is_full else linear_mixer, feed_forward, hidden)
        for is_full, feed_forward in zip(
            _full_attention(fields, len(feed_forwards)), feed_forwards, strict=True
        )
    )


def _gated_attention(fields: Fields) -> blocks.MixerBlock:
    spec = blocks.grouped_attention(fields, fields.count("head_dim"), qk_norm=True)
    # The doubled query projection holds the output gate.
    spec = replace(spec, output_gate=True)
    bias = fields.flag("attention_bias", False)
    return spec, under("self_attn", blocks.attention(fields.count("hidden_size"), spec, bias=bias))


def mtp_head(fields: Fields) -> Model:
    """Return the prediction layers of a target's config, or of their own: `mlx-vlm`'s drafter.

    They read the embedding and the hidden state of a token; embedding and head are the target's
    (mlx_vlm/speculative/drafters/qwen3_5_mtp/qwen3_5_mtp.py, Qwen3_5MTPDraftModel).
    """
    text = _text_section(fields)
    # The class has no embedding of its own, so that its tensors would not load.
    text.expect("mtp_use_dedicated_embeddings", False)
    hidden = text.count("hidden_size")
    is_sparse = text.count("num_experts", least=0) > 0
    feed_forward = _experts_block(text) if is_sparse else _dense_block(text)
    layer = blocks.decoder_layer(_gated_attention(text), feed_forward, hidden)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    modules = (linear("fc", 2 * hidden, hidden), *(norm(name, hidden) for name in norms))
    layers = [layer] * text.layers("mtp_num_hidden_layers", 1)
    model = blocks.decoder(text, layers, modules, layers_path="layers")
    return replace(model, model_type=MTP_HEAD)


def _full_attention(fields: Fields, count: int) -> list[bool]:
    """Whether each layer attends fully; mlx-lm reads the interval only, never the list.

    For its masks the class looks at a layer of each kind, so that there must be both.
    """
    interval = fields.count("full_attention_interval", 4, least=2, most=count)
    full = [index % interval == interval - 1 for index in range(count)]
    for index, kind in enumerate(fields.texts("layer_types", count) or ()):
        if kind != ("full_attention" if full[index] else "linear_attention"):
            raise fields.fail(
                f"layer_types[{index}]",
                f"{kind[:40]!r}, but mlx-lm goes by full_attention_interval {interval}",
            )
    return full


def _delta_spec(fields: Fields) -> GatedDelta:
    """The gated delta net layers."""
    spec = GatedDelta(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        kernel=fields.count("linear_conv_kernel_dim", least=2),
    )
    if spec.value_heads % spec.key_heads:
        raise fields.fail(
            "linear_num_value_heads",
            f"{spec.value_heads} is not a multiple of linear_num_key_heads {spec.key_heads}",
        )
    return spec


def _experts_block(fields: Fields) -> blocks.FeedForwardBlock:
    """Routed experts with one gated shared expert."""
    hidden = fields.count("hidden_size")
    spec = blocks.mixture(
        fields,
        "num_experts",
        width=fields.count("moe_intermediate_size"),
        shared_width=fields.count("shared_expert_intermediate_size"),
    )
    modules = blocks.expert_modules(
        spec, hidden, blocks.router_8bit("gate", hidden, spec.experts), shared="shared_expert"
    )
    gate = linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS, predicate=ROUTER_8BIT)
    return spec, under("mlp", (*modules, gate))


def _dense_block(fields: Fields) -> blocks.FeedForwardBlock:
    """The dense MLP of layers without experts."""
    return blocks.dense_mlp(fields.count("hidden_size"), fields.count("intermediate_size"))


_QWEN3_5 = Irregular(
    builder=_build_qwen3_5,
    drops=r"^vision_tower|^model\.visual|mtp\.",
    renames=NESTED,
    tensor={
        **DENSE,
        "self_attn.k_proj": Cut.KV_HEADS,
        "self_attn.v_proj": Cut.KV_HEADS,
        **{f"linear_attn.in_proj_{name}": Cut.OUTPUTS for name in ("qkv", "z", "b", "a")},
        **{f"linear_attn.{name}": Cut.FIRST for name in ("conv1d", "dt_bias", "A_log")},
        "linear_attn.out_proj": Cut.INPUTS,
        **EXPERTS,
        **projections("mlp.shared_expert"),
        "language_model.lm_head": Cut.OUTPUTS,
    },
    pipeline=True,
    since=(0, 30, 7),
    vision=VisionTraits(pads_heads=True),
)
CLASSES = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, expert_names={}, joined=GATE_UP),
    "qwen3_next": Irregular(
        builder=_build_next,
        # The class returns early, and drops nothing, when no experts are to be stacked.
        drops_in_layout=(".mlp.experts.*.up_proj.weight", r"mtp\."),
        drops_when_tied=HEAD,
        pipeline=True,
        since=(0, 28, 0),
    ),
}
