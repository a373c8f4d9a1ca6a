"""Kimi Linear: delta attention with a decay per channel, latent attention every few layers.

Source: mlx-lm models/kimi_linear.py.
"""

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    Model,
    Part,
    array,
    convolution,
    linear,
    multi_linear,
    norm,
    under,
)
from memfit.estimators.arch.registry import HEAD, W_NAMES, Irregular
from memfit.estimators.arch.specs import GatedDelta, LatentAttention


def _build(fields: Fields) -> Model:
    hidden = fields.count("hidden_size")
    fields.ignore("num_key_value_heads", "use_grouped_topk", "num_expert_group", "topk_group")
    fields.ignore("moe_renormalize", "mlp_layer_types")
    linear_config = fields.section("linear_attn_config")
    mixers = {True: _delta(linear_config, hidden), False: _latent(fields, hidden)}
    count = fields.layers()
    layers = (
        blocks.decoder_layer(mixers[is_linear], feed_forward, hidden)
        for is_linear, feed_forward in zip(
            _linear_layers(linear_config, count), _feed_forwards(fields, hidden, count), strict=True
        )
    )
    return blocks.decoder(
        fields,
        layers,
        blocks.ends(fields, tied=fields.flag("tie_word_embeddings", False)),
        makes_own_cache=True,
        kv_quantizable=False,
    )


def _linear_layers(linear_config: Fields, count: int) -> list[bool]:
    """Whether each layer is linear, by a list that counts from 1; the class needs both kinds."""
    linear_config.ignore("full_attn_layers")
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


def _delta(linear_config: Fields, hidden: int) -> blocks.MixerBlock:
    """Three convolutions in place of one; the decay's parameters stay float32."""
    heads, head_dim = linear_config.count("num_heads"), linear_config.count("head_dim")
    kernel = linear_config.count("short_conv_kernel_size", 4, least=2)
    spec = GatedDelta(
        key_heads=heads, value_heads=heads, key_dim=head_dim, value_dim=head_dim, kernel=kernel
    )
    width = heads * head_dim
    modules = (
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
    return spec, under("self_attn", modules)


def _latent(fields: Fields, hidden: int) -> blocks.MixerBlock:
    """Latent attention without a query rank; widths left out, or 0, are head_dim or nothing."""
    heads, rank = fields.count("num_attention_heads"), fields.count("kv_lora_rank")
    head_dim = fields.count("head_dim")
    nope = fields.count("qk_nope_head_dim", 0, least=0) or head_dim
    rope = fields.count("qk_rope_head_dim", 0, least=0)
    value = fields.count("v_head_dim", 0, least=0) or head_dim
    spec = LatentAttention(
        heads=heads, latent_dim=rank, rope_dim=rope, nope_dim=nope, value_dim=value
    )
    modules = (
        linear("q_proj", hidden, heads * (nope + rope)),
        linear("kv_a_proj_with_mqa", hidden, rank + rope),
        norm("kv_a_layernorm", rank),
        multi_linear("embed_q", heads, nope, rank),
        multi_linear("unembed_out", heads, rank, value),
        linear("o_proj", heads * value, hidden),
    )
    return spec, under("self_attn", modules)


def _feed_forwards(fields: Fields, hidden: int, count: int) -> list[blocks.FeedForwardBlock]:
    first = fields.count("first_k_dense_replace", 0, least=0)
    frequency = fields.count("moe_layer_freq", 1)
    dense = blocks.dense_mlp(hidden, fields.count("intermediate_size"))
    sparse = _experts(fields, hidden) if fields.count("num_experts", least=0) else dense
    return [
        sparse if index >= first and index % frequency == 0 else dense for index in range(count)
    ]


def _experts(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    width = fields.count("moe_intermediate_size")
    spec = blocks.mixture(
        fields,
        "num_experts",
        "num_experts_per_token",
        width=width,
        shared_width=width * fields.count("num_shared_experts", 0, least=0),
    )
    router = (
        *blocks.router_8bit("gate", hidden, spec.experts),
        array("e_score_correction_bias", (spec.experts,), Part.ROUTER, float32=True),
    )
    return spec, under("mlp", blocks.expert_modules(spec, hidden, router))


CLASSES = {
    "kimi_linear": Irregular(
        builder=_build,
        defaults={"num_experts_per_token": 1},
        drops=r"^model\.mtp",
        drops_when_tied=HEAD,
        renames=(
            (r"\.(?=[qkv]_conv1d\.weight$)([qkv])_conv1d\.", r".\1_conv.conv."),
            (r"\.block_sparse_moe\.gate\.e_score", ".mlp.e_score"),
            (r"\.block_sparse_moe\.(?!experts\.)", ".mlp."),
        ),
        expert_names=W_NAMES,
        since=(0, 28, 4),
        rewritten=((0, 30, 7), "fd6959dc"),
    )
}
