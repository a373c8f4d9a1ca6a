"""Kimi Linear: delta attention with a decay a channel, latent attention every few layers.

Source: mlx-lm models/kimi_linear.py.
"""

from memfit.estimators.arch.families.hybrid import MixerBlock, outside
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import (
    ROUTER_8BIT,
    Modules,
    Part,
    array,
    convolution,
    gated_mlp,
    linear,
    multi_linear,
    norm,
    switch_glu,
    under,
)
from memfit.estimators.arch.specs import (
    DenseMLP,
    FeedForward,
    GatedDelta,
    LatentAttention,
    MixtureOfExperts,
)


def build(fields: Fields) -> Model:
    """Return the model of a ``kimi_linear`` config."""
    hidden = fields.count("hidden_size")
    fields.inert("num_key_value_heads", "use_grouped_topk", "num_expert_group", "topk_group")
    fields.inert("moe_renormalize", "mlp_layer_types")
    linear_config = fields.section("linear_attn_config")
    mixers = {True: _delta(linear_config, hidden), False: _latent(fields, hidden)}
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    count = fields.layers()
    layers = []
    for is_linear, (feed_forward, modules) in zip(
        _linear_layers(linear_config, count), _feed_forwards(fields, hidden, count), strict=True
    ):
        mixer, mixer_modules = mixers[is_linear]
        layer_modules = under("self_attn", mixer_modules) + under("mlp", modules) + norms
        layers.append(Layer((mixer,), feed_forward, layer_modules))
    return Model(
        model_type="kimi_linear",
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        layers=tuple(layers),
        modules=outside(fields, tied=fields.flag("tie_word_embeddings", False)),
        makes_own_cache=True,
        kv_quantizable=False,
    )


def _linear_layers(linear_config: Fields, count: int) -> list[bool]:
    """Whether each layer is linear, by a list that counts from 1; the class needs both kinds."""
    linear_config.inert("full_attn_layers")
    listed = linear_config.counts("kda_layers") or [0]
    if not 1 <= listed[0] <= count:
        raise linear_config.fail("kda_layers", f"must begin with a layer from 1 to {count}")
    named = set(listed)
    kinds = [index + 1 in named for index in range(count)]
    if all(kinds):
        raise linear_config.fail(
            "kda_layers", "every layer is linear; the model class needs one not"
        )
    return kinds


def _delta(linear_config: Fields, hidden: int) -> MixerBlock:
    """Three convolutions in place of one; the decay's parameters stay float32."""
    heads, head_dim = linear_config.count("num_heads"), linear_config.count("head_dim")
    kernel = linear_config.count("short_conv_kernel_size", 4, least=2)
    spec = GatedDelta(
        key_heads=heads, value_heads=heads, key_dim=head_dim, value_dim=head_dim, kernel=kernel
    )
    width = heads * head_dim
    return spec, (
        *(linear(f"{name}_proj", hidden, width) for name in "qkv"),
        *(convolution(f"{name}_conv.conv", width, kernel) for name in "qkv"),
        linear("f_a_proj", hidden, head_dim),
        linear("f_b_proj", head_dim, width),
        linear("b_proj", hidden, heads),
        linear("g_a_proj", hidden, head_dim),
        linear("g_b_proj", head_dim, width),
        array("A_log", (1, 1, heads, 1), float32=True),
        array("dt_bias", (width,), float32=True),
        norm("o_norm", head_dim),
        linear("o_proj", width, hidden),
    )


def _latent(fields: Fields, hidden: int) -> MixerBlock:
    """Latent attention without a query rank; widths left out, or 0, are head_dim or nothing."""
    heads, rank = fields.count("num_attention_heads"), fields.count("kv_lora_rank")
    head_dim = fields.count("head_dim")
    nope = fields.count("qk_nope_head_dim", 0, least=0) or head_dim
    rope = fields.count("qk_rope_head_dim", 0, least=0)
    value = fields.count("v_head_dim", 0, least=0) or head_dim
    spec = LatentAttention(
        heads=heads, latent_dim=rank, rope_dim=rope, nope_dim=nope, value_dim=value
    )
    return spec, (
        linear("q_proj", hidden, heads * (nope + rope)),
        linear("kv_a_proj_with_mqa", hidden, rank + rope),
        norm("kv_a_layernorm", rank),
        multi_linear("embed_q", heads, nope, rank),
        multi_linear("unembed_out", heads, rank, value),
        linear("o_proj", heads * value, hidden),
    )


def _feed_forwards(fields: Fields, hidden: int, count: int) -> list[tuple[FeedForward, Modules]]:
    first = fields.count("first_k_dense_replace", 0, least=0)
    frequency = fields.count("moe_layer_freq", 1)
    intermediate = fields.count("intermediate_size")
    dense = DenseMLP(intermediate=intermediate), gated_mlp(hidden, intermediate)
    sparse = _experts(fields, hidden) if fields.count("num_experts", least=0) else dense
    return [
        sparse if index >= first and index % frequency == 0 else dense for index in range(count)
    ]


def _experts(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    experts, width = fields.count("num_experts"), fields.count("moe_intermediate_size")
    shared = width * fields.count("num_shared_experts", 0, least=0)
    spec = MixtureOfExperts(
        experts=experts,
        top_k=fields.count("num_experts_per_token", 1, most=experts),
        intermediate=width,
        shared_intermediate=shared,
    )
    modules = (
        linear("gate", hidden, experts, Part.ROUTER, predicate=ROUTER_8BIT),
        *under("switch_mlp", switch_glu(hidden, width, experts)),
        array("e_score_correction_bias", (experts,), Part.ROUTER, float32=True),
    )
    if shared:
        modules += under("shared_experts", gated_mlp(hidden, shared, part=Part.SHARED_EXPERTS))
    return spec, modules
