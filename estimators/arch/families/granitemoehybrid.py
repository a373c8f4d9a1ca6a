"""Granite 4 hybrids: Mamba-2 and attention layers, over experts with a shared one, or dense.

Source: mlx-lm models/granitemoehybrid.py.
"""

from memfit.estimators.arch.families.hybrid import (
    Mamba2,
    MixerBlock,
    derived_head_dim,
    grouped_attention,
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


def build(fields: Fields) -> Model:
    """Return the model of a ``granitemoehybrid`` config."""
    fields = fields.revised({}, {"tie_word_embeddings": True})
    fields.inert(*_MAMBA_KEYS)
    hidden = fields.count("hidden_size")
    kinds = _kinds(fields)
    makers = {"attention": _attention, "mamba": _mamba}
    mixers = {kind: makers[kind](fields, hidden) for kind in dict.fromkeys(kinds)}
    if fields.count("num_local_experts", 0, least=0):
        feed_forward, feed_modules = _experts(fields, hidden)
    else:
        feed_forward, feed_modules = _dense(fields, hidden)
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    return Model(
        model_type="granitemoehybrid",
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        layers=tuple(
            Layer((mixers[kind][0],), feed_forward, mixers[kind][1] + feed_modules + norms)
            for kind in kinds
        ),
        modules=outside(fields, tied=fields.flag("tie_word_embeddings", False)),
        makes_own_cache=True,
    )


def _kinds(fields: Fields) -> list[str]:
    kinds = fields.texts("layer_types", fields.layers())
    if kinds is None:
        raise fields.fail("layer_types", "missing; the model class needs it")
    require_kinds(fields, "layer_types", kinds, ("attention", "mamba"))
    return kinds


def _attention(fields: Fields, hidden: int) -> MixerBlock:
    spec = grouped_attention(fields, derived_head_dim(fields))
    bias = fields.truth("attention_bias")
    return spec, under(
        "self_attn", attention(hidden, spec.heads, spec.kv_heads, spec.key_dim, bias=bias)
    )


def _mamba(fields: Fields, hidden: int) -> MixerBlock:
    bias = fields.flag("mamba_proj_bias", False)
    heads, groups = fields.count("mamba_n_heads"), fields.count("mamba_n_groups")
    fields.require_multiple("mamba_n_heads", heads, "mamba_n_groups", groups)
    spec, modules = Mamba2(
        heads=heads,
        head_dim=fields.count("mamba_d_head"),
        groups=groups,
        state=fields.count("mamba_d_state"),
        kernel=fields.count("mamba_d_conv", least=2),
        conv_bias=fields.flag("mamba_conv_bias", False),
        input_bias=bias,
        output_bias=bias,
    ).block(hidden)
    return spec, under("mamba", modules)


def _dense(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    fields.inert("num_experts_per_tok", "shared_intermediate_size")
    intermediate = fields.count("intermediate_size")
    bias = fields.flag("mlp_bias", False)
    return DenseMLP(intermediate=intermediate), under(
        "mlp", gated_mlp(hidden, intermediate, bias=bias)
    )


def _experts(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    """Routed experts beside a shared one whose input projections are one matrix."""
    experts = fields.count("num_local_experts")
    spec = MixtureOfExperts(
        experts=experts,
        top_k=fields.count("num_experts_per_tok", most=experts),
        intermediate=fields.count("intermediate_size"),
        shared_intermediate=fields.count("shared_intermediate_size"),
    )
    shared = spec.shared_intermediate
    router = "block_sparse_moe.router.layer"
    return spec, (
        linear("shared_mlp.input_linear", hidden, 2 * shared, Part.SHARED_EXPERTS),
        linear("shared_mlp.output_linear", shared, hidden, Part.SHARED_EXPERTS),
        linear(router, hidden, experts, Part.ROUTER, predicate=ROUTER_8BIT),
        *under("block_sparse_moe.switch_mlp", switch_glu(hidden, spec.intermediate, experts)),
    )
