"""Jamba: Mamba with an attention layer now and then, experts in every few layers.

Source: mlx-lm models/jamba.py.
"""

from memfit.estimators.arch.families.hybrid import (
    MixerBlock,
    derived_head_dim,
    grouped_attention,
    mamba,
    outside,
    require_kinds,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import (
    ROUTER_8BIT,
    Modules,
    Part,
    attention,
    gated_mlp,
    linear,
    norm,
    switch_glu,
    under,
)
from memfit.estimators.arch.specs import DenseMLP, FeedForward, MixtureOfExperts
from memfit.estimators.base.units import ceil_div

# mlx-lm ModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {"mamba_dt_rank": "auto", "mamba_conv_bias": True, "tie_word_embeddings": True}
_KINDS = ("attention", "mamba")


def build(fields: Fields) -> Model:
    """Return the model of a ``jamba`` config."""
    fields = fields.revised({}, _DEFAULTS)
    fields.inert("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    hidden = fields.count("hidden_size")
    mixers = {"attention": _attention(fields, hidden), "mamba": _mamba(fields, hidden)}
    norms = (norm("input_layernorm", hidden), norm("pre_ff_layernorm", hidden))
    layers = []
    kinds = _kinds(fields)
    for kind, sparse in zip(kinds, _sparse(fields, len(kinds)), strict=True):
        mixer, mixer_modules = mixers[kind]
        feed_forward, modules = (_experts if sparse else _dense)(fields, hidden)
        layers.append(
            Layer((mixer,), feed_forward, mixer_modules + under("feed_forward", modules) + norms)
        )
    tied = fields.flag("tie_word_embeddings", False)
    return Model(
        model_type="jamba",
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        layers=tuple(layers),
        modules=outside(fields, tied=tied, norm_path="model.final_layernorm"),
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
    fields.inert("attn_layer_period", "attn_layer_offset")
    require_kinds(fields, key, kinds, _KINDS, _KINDS)
    return kinds


def _sparse(fields: Fields, count: int) -> list[bool]:
    """Which layers have experts; the class adds the offset where others subtract it."""
    if fields.count("num_experts", least=0) < 2:
        fields.inert("expert_layer_period", "expert_layer_offset", "num_experts_per_tok")
        return [False] * count
    period = fields.count("expert_layer_period")
    offset = fields.count("expert_layer_offset", least=0)
    return [(index + offset) % period == 0 for index in range(count)]


def _attention(fields: Fields, hidden: int) -> MixerBlock:
    spec = grouped_attention(fields, derived_head_dim(fields))
    return spec, under("self_attn", attention(hidden, spec.heads, spec.kv_heads, spec.key_dim))


def _mamba(fields: Fields, hidden: int) -> MixerBlock:
    """Mamba with norms on its time step, B and C."""
    state = fields.count("mamba_d_state")
    rank = fields.automatic_count("mamba_dt_rank", ceil_div(hidden, 16))
    spec, modules = mamba(
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


def _dense(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    intermediate = fields.count("intermediate_size")
    return DenseMLP(intermediate=intermediate), gated_mlp(hidden, intermediate)


def _experts(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    experts = fields.count("num_experts")
    spec = MixtureOfExperts(
        experts=experts,
        top_k=fields.count("num_experts_per_tok", most=experts),
        intermediate=fields.count("intermediate_size"),
    )
    return spec, (
        linear("router", hidden, experts, Part.ROUTER, predicate=ROUTER_8BIT),
        *under("switch_mlp", switch_glu(hidden, spec.intermediate, experts)),
    )
