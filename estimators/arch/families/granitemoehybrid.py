"""Granite 4 hybrids: Mamba-2 and attention layers, over experts with a shared one, or dense.

Source: mlx-lm models/granitemoehybrid.py.
"""

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, Part, linear, switch_glu, under
from memfit.estimators.arch.registry import HEAD, INPUT_OUTPUT, Irregular

_MAMBA_KEYS = (
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mamba_expand",
    "mamba_chunk_size",
)


def _build(fields: Fields) -> Model:
    fields.ignore(*_MAMBA_KEYS)
    hidden = fields.count("hidden_size")
    kinds = _kinds(fields)
    makers = {"attention": _attention, "mamba": _mamba}
    mixers = {kind: makers[kind](fields, hidden) for kind in dict.fromkeys(kinds)}
    make = _experts if fields.count("num_local_experts", 0, least=0) else _dense
    feed_forward = make(fields, hidden)
    layers = {
        kind: blocks.decoder_layer(mixer, feed_forward, hidden) for kind, mixer in mixers.items()
    }
    return blocks.decoder(
        fields,
        (layers[kind] for kind in kinds),
        blocks.ends(fields, tied=fields.flag("tie_word_embeddings", False)),
        makes_own_cache=True,
    )


def _kinds(fields: Fields) -> list[str]:
    kinds = fields.texts("layer_types", fields.layers())
    if kinds is None:
        raise fields.fail("layer_types", "missing; the model class needs it")
    fields.require_kinds("layer_types", kinds, ("attention", "mamba"))
    return kinds


def _attention(fields: Fields, hidden: int) -> blocks.MixerBlock:
    spec = blocks.grouped_attention(fields, blocks.derived_head_dim(fields))
    bias = fields.required_flag("attention_bias")
    return spec, under("self_attn", blocks.attention(hidden, spec, bias=bias))


def _mamba(fields: Fields, hidden: int) -> blocks.MixerBlock:
    bias = fields.flag("mamba_proj_bias", False)
    spec, modules = blocks.mamba2(
        fields, conv_bias=fields.flag("mamba_conv_bias", False), input_bias=bias, output_bias=bias
    )
    return spec, under("mamba", modules)


def _dense(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    fields.ignore("num_experts_per_tok", "shared_intermediate_size")
    bias = fields.flag("mlp_bias", False)
    return blocks.dense_mlp(hidden, fields.count("intermediate_size"), bias=bias)


def _experts(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    """Routed experts and a shared one; its input projections are one matrix."""
    spec = blocks.mixture(
        fields,
        "num_local_experts",
        width=fields.count("intermediate_size"),
        shared_width=fields.count("shared_intermediate_size"),
    )
    shared = spec.shared_intermediate
    return spec, (
        linear("shared_mlp.input_linear", hidden, 2 * shared, Part.SHARED_EXPERTS),
        linear("shared_mlp.output_linear", shared, hidden, Part.SHARED_EXPERTS),
        *blocks.router_8bit("block_sparse_moe.router.layer", hidden, spec.experts),
        *under("block_sparse_moe.switch_mlp", switch_glu(hidden, spec.intermediate, spec.experts)),
    )


CLASSES = {
    "granitemoehybrid": Irregular(
        builder=_build,
        defaults={"tie_word_embeddings": True},
        expert_names={},
        joined=INPUT_OUTPUT,
        drops_when_tied=HEAD,
        since=(0, 28, 0),
    )
}
