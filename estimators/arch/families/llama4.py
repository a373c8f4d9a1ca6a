"""Llama 4 text: three chunked layers, then a full one; experts every few layers.

Source: mlx-lm models/llama4.py (its ``TextArgs``) and models/llama4_text.py, a class of its own
for small dense models.
"""

from collections.abc import Iterator
from dataclasses import replace

from memfit.estimators.arch.caches import Growth
from memfit.estimators.arch.families.dense import describe
from memfit.estimators.arch.families.dense_traits import Dense, HeadDim, Key
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import (
    Modules,
    Part,
    attention,
    embedding,
    gated_mlp,
    linear,
    norm,
    switch_glu,
    under,
)
from memfit.estimators.arch.specs import (
    Attention,
    DenseMLP,
    FeedForward,
    MixtureOfExperts,
)

_FULL_INTERVAL = 4  # fixed in the class, whatever `no_rope_layers` says


_TEXT_CLASS = Dense(
    head_dim=HeadDim.GIVEN,
    width_key="intermediate_size_mlp",
    mlp="feed_forward",
    head="output",
    tied=Key("tie_word_embeddings"),
    # The class has experts nowhere and attends to everything.
    inert=(
        "intermediate_size",
        "attention_chunk_size",
        "attn_temperature_tuning",
        "no_rope_layer_interval",
        "use_qk_norm",
    ),
)


def build(fields: Fields) -> Model:
    """Return the model of a ``llama4_text`` config: dense, with full attention only."""
    count = fields.layers()
    fields.texts("layer_types", count)
    if fields.items("no_rope_layers", count) is None:
        raise fields.fail("no_rope_layers", "missing; the model class needs it")
    return describe(fields, _TEXT_CLASS, "llama4_text")


def build_language_model(fields: Fields) -> Model:
    """Return the language model inside a ``llama4`` config, which has a head of its own."""
    hidden, count = fields.count("hidden_size"), fields.layers()
    vocabulary = fields.count("vocab_size")
    if count < _FULL_INTERVAL:
        # The class looks at the cache of the first full layer for its mask.
        raise fields.fail("num_hidden_layers", f"{count}: the model class needs {_FULL_INTERVAL}")
    fields.texts("layer_types", count)
    fields.inert("no_rope_layers", "no_rope_layer_interval", "moe_layers", "use_qk_norm")
    fields.inert("attn_temperature_tuning", "floor_scale", "attn_scale")
    return Model(
        model_type="llama4",
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(_layers(fields, hidden, count)),
        modules=(
            embedding("model.embed_tokens", vocabulary, hidden),
            norm("model.norm", hidden),
            linear("lm_head", hidden, vocabulary, Part.HEAD),
        ),
        makes_own_cache=True,
    )


def _layers(fields: Fields, hidden: int, count: int) -> Iterator[Layer]:
    full = _attention_spec(fields, hidden)
    chunk = fields.count("attention_chunk_size")
    chunked = replace(full, window=chunk, growth=Growth.CHUNKED)
    bias = fields.flag("attention_bias")
    shared = (
        *under("self_attn", attention(hidden, full.heads, full.kv_heads, full.key_dim, bias=bias)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    step = fields.count("interleave_moe_layer_step")
    dense, sparse = _dense(fields, hidden), _experts(fields, hidden, used=step <= count)
    for index in range(count):
        feed_forward, modules = dense if (index + 1) % step else sparse
        mixer = chunked if (index + 1) % _FULL_INTERVAL else full
        yield Layer((mixer,), feed_forward, shared + modules)


def _attention_spec(fields: Fields, hidden: int) -> Attention:
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = fields.optional_count("head_dim") or hidden // heads
    if not head_dim:
        raise fields.fail("num_attention_heads", f"{heads} are more than hidden_size {hidden}")
    return Attention(heads=heads, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim)


def _dense(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    intermediate = fields.count("intermediate_size_mlp")
    return DenseMLP(intermediate=intermediate), under(
        "feed_forward", gated_mlp(hidden, intermediate)
    )


def _experts(fields: Fields, hidden: int, *, used: bool) -> tuple[FeedForward, Modules]:
    """One routed expert a token, and a shared one of the same width."""
    intermediate = fields.count("intermediate_size")
    experts = fields.count("num_local_experts", least=int(used))
    top_k = fields.count("num_experts_per_tok", least=0)
    if used and top_k != 1:
        raise fields.fail("num_experts_per_tok", f"{top_k}: the model class has one a token")
    spec = MixtureOfExperts(
        experts=experts, top_k=top_k, intermediate=intermediate, shared_intermediate=intermediate
    )
    modules = (
        linear("router", hidden, experts, Part.ROUTER),
        *under("experts", switch_glu(hidden, intermediate, experts)),
        *under("shared_expert", gated_mlp(hidden, intermediate, part=Part.SHARED_EXPERTS)),
    )
    return spec, under("feed_forward", modules)
