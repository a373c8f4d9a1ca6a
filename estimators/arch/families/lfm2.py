"""LFM2, dense or over experts: short convolutions with an attention layer now and then.

Source: mlx-lm models/lfm2.py and lfm2_moe.py; the head is always the embedding.
"""

from collections.abc import Callable

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, Part, array, linear, under
from memfit.estimators.arch.registry import W_NAMES, Irregular
from memfit.estimators.arch.specs import DenseMLP
from memfit.estimators.base.units import round_up

_KINDS = ("full_attention", "conv")
FeedForwards = Callable[[Fields, int], list[blocks.FeedForwardBlock]]


def _build(fields: Fields, feed_forwards: FeedForwards) -> Model:
    hidden = fields.count("hidden_size")
    kinds = _kinds(fields)
    convolution, convolution_modules = blocks.short_convolution(fields)
    mixers = {
        "full_attention": _attention(fields, hidden),
        "conv": (convolution, under("conv", convolution_modules)),
    }
    layers = (
        blocks.decoder_layer(
            mixers[kind], feed_forward, hidden, norms=("operator_norm", "ffn_norm")
        )
        for kind, feed_forward in zip(kinds, feed_forwards(fields, len(kinds)), strict=True)
    )
    return blocks.decoder(
        fields,
        layers,
        blocks.ends(fields, tied=True, norm_path="model.embedding_norm"),
        makes_own_cache=True,
    )


def _kinds(fields: Fields) -> list[str]:
    """The mixer of each layer; indices win over names, and the class needs both kinds."""
    count = fields.layers()
    key = "full_attn_idxs" if fields.has("full_attn_idxs") else "layer_types"
    fields.ignore("full_attn_idxs", "layer_types")
    if key == "full_attn_idxs":
        indices = set(fields.counts(key, least=0) or ())
        kinds = [_KINDS[index not in indices] for index in range(count)]
        if any(index >= count for index in indices):
            raise fields.fail(key, f"names a layer beyond the {count} there are")
    else:
        kinds = fields.texts(key, count) or []
    fields.require_kinds(key, kinds, _KINDS, _KINDS)
    return kinds


def _attention(fields: Fields, hidden: int) -> blocks.MixerBlock:
    if fields.null("num_key_value_heads"):
        fields = fields.with_overrides({"num_key_value_heads": fields.count("num_attention_heads")})
    spec = blocks.grouped_attention(fields, blocks.derived_head_dim(fields), qk_norm=True)
    modules = blocks.attention(
        hidden, spec, output="out_proj", norms=("q_layernorm", "k_layernorm")
    )
    return spec, under("self_attn", modules)


def _dense_feed_forwards(fields: Fields, count: int) -> list[blocks.FeedForwardBlock]:
    fields.ignore("num_heads", "conv_dim", "conv_dim_out", "block_use_swiglu", "intermediate_size")
    fields.ignore("block_use_xavier_init", "conv_use_xavier_init")
    hidden, width = fields.count("hidden_size"), _adjusted_width(fields)
    fields.expect("block_dim", hidden)
    modules = (
        linear("w1", hidden, width, Part.MLP),
        linear("w3", hidden, width, Part.MLP),
        linear("w2", width, hidden, Part.MLP),
    )
    return [(DenseMLP(intermediate=width), under("feed_forward", modules))] * count


def _adjusted_width(fields: Fields) -> int:
    """Two thirds of the width named, times a factor, up to a multiple."""
    key = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    width = fields.count(key)
    multiple = fields.count("block_multiple_of")
    factor = fields.number("block_ffn_dim_multiplier", 1)
    if not fields.flag("block_auto_adjust_ff_dim", False):
        return width
    width = round_up(int(factor * (2 * width // 3)), multiple)
    if not width:
        raise fields.fail(key, "is adjusted to nothing by block_ffn_dim_multiplier")
    return width


def _sparse_feed_forwards(fields: Fields, count: int) -> list[blocks.FeedForwardBlock]:
    """Dense layers first, then experts."""
    hidden = fields.count("hidden_size")
    dense_count = min(fields.count("num_dense_layers", least=0), count)
    dense = blocks.dense_mlp(hidden, fields.count("intermediate_size"), path="feed_forward")
    return [dense] * dense_count + [_experts(fields, hidden)] * (count - dense_count)


def _experts(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    spec = blocks.mixture(fields, "num_experts", width=fields.count("moe_intermediate_size"))
    router = blocks.router_8bit("gate", hidden, spec.experts)
    if fields.required_flag("use_expert_bias"):
        router += (array("expert_bias", (spec.experts,), Part.ROUTER, float32=True),)
    return spec, under("feed_forward", blocks.expert_modules(spec, hidden, router))


CLASSES = {
    "lfm2": Irregular(
        builder=lambda fields: _build(fields, _dense_feed_forwards), since=(0, 26, 1)
    ),
    "lfm2_moe": Irregular(
        builder=lambda fields: _build(fields, _sparse_feed_forwards),
        renames=tuple((rf"\.{w}\.weight$", f".{name}.weight") for w, name in W_NAMES.items()),
        since=(0, 28, 3),
    ),
}
