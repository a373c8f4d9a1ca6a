"""Jamba: Mamba with an attention layer now and then, experts in every few layers.

Source: mlx-lm models/jamba.py.
"""

from collections.abc import Callable

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, norm, under
from memfit.estimators.arch.registry import HEAD, Irregular
from memfit.estimators.base.units import ceil_div

# mlx-lm ModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {"mamba_dt_rank": "auto", "mamba_conv_bias": True, "tie_word_embeddings": True}
_KINDS = ("attention", "mamba")


def _build(fields: Fields) -> Model:
    fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    hidden = fields.count("hidden_size")
    mixers = {"attention": _attention(fields, hidden), "mamba": _mamba(fields, hidden)}
    kinds = _kinds(fields)
    norms = ("input_layernorm", "pre_ff_layernorm")
    layers = (
        blocks.decoder_layer(mixers[kind], make(fields, hidden), hidden, norms=norms)
        for kind, make in zip(kinds, _feed_forwards(fields, len(kinds)), strict=True)
    )
    tied = fields.flag("tie_word_embeddings", False)
    return blocks.decoder(
        fields,
        layers,
        blocks.ends(fields, tied=tied, norm_path="model.final_layernorm"),
        makes_own_cache=True,
    )


def _kinds(fields: Fields) -> list[str]:
    """The mixer of each layer, named one by one or by period; the class needs both kinds."""
    count = fields.layers()
    key = "layers_block_type"
    kinds = fields.texts(key, count)
    if kinds is None:
        key = "attn_layer_offset"
        period, offset = fields.count("attn_layer_period"), fields.count(key, least=0)
        kinds = [_KINDS[index % period != offset] for index in range(count)]
    fields.ignore("attn_layer_period", "attn_layer_offset")
    fields.require_kinds(key, kinds, _KINDS, _KINDS)
    return kinds


def _feed_forwards(
    fields: Fields, count: int
) -> list[Callable[[Fields, int], blocks.FeedForwardBlock]]:
    """What makes each layer's block; the class adds the offset where others subtract it."""
    if fields.count("num_experts", least=0) < 2:
        fields.ignore("expert_layer_period", "expert_layer_offset", "num_experts_per_tok")
        return [_dense] * count
    period = fields.count("expert_layer_period")
    offset = fields.count("expert_layer_offset", least=0)
    return [_dense if (index + offset) % period else _experts for index in range(count)]


def _attention(fields: Fields, hidden: int) -> blocks.MixerBlock:
    spec = blocks.grouped_attention(fields, blocks.derived_head_dim(fields))
    return spec, under("self_attn", blocks.attention(hidden, spec))


def _mamba(fields: Fields, hidden: int) -> blocks.MixerBlock:
    """Mamba with norms on its time step, B and C."""
    state = fields.count("mamba_d_state")
    rank = fields.count_or_auto("mamba_dt_rank", ceil_div(hidden, 16))
    spec, modules = blocks.mamba(
        hidden,
        fields.count("mamba_expand") * hidden,
        state,
        fields.count("mamba_d_conv", least=2),
        rank,
        conv_bias=fields.flag("mamba_conv_bias", False),
        bias=fields.flag("mamba_proj_bias", False),
        keeps_all_states=True,
    )
    norms = (norm("dt_layernorm", rank), norm("b_layernorm", state), norm("c_layernorm", state))
    return spec, under("mamba", modules + norms)


def _dense(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    return blocks.dense_mlp(hidden, fields.count("intermediate_size"), path="feed_forward")


def _experts(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    spec = blocks.mixture(fields, "num_experts", width=fields.count("intermediate_size"))
    router = blocks.router_8bit("router", hidden, spec.experts)
    return spec, under("feed_forward", blocks.expert_modules(spec, hidden, router))


CLASSES = {
    "jamba": Irregular(
        builder=_build,
        defaults=_DEFAULTS,
        drops_when_tied=HEAD,
        since=(0, 28, 3),
    )
}
