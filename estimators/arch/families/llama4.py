"""Llama 4 text: three chunked layers, then a full one; experts every few layers.

Source: mlx-lm models/llama4.py (its ``TextArgs``) and models/llama4_text.py, a class of its own
for small dense models.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families.dense import Dense, HeadDim, Key
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model, Part, gated_mlp, linear, switch_glu, under
from memfit.estimators.arch.registry import Irregular
from memfit.estimators.arch.specs import Growth, MixtureOfExperts

_FULL_INTERVAL = 4  # fixed in the class, whatever `no_rope_layers` says


_TEXT_CLASS = Dense(
    head_dim=HeadDim.GIVEN,
    width_key="intermediate_size_mlp",
    mlp="feed_forward",
    head="output",
    tied=Key("tie_word_embeddings"),
    # The class has experts nowhere and attends to everything.
    ignored=(
        "intermediate_size",
        "attention_chunk_size",
        "attn_temperature_tuning",
        "no_rope_layer_interval",
        "use_qk_norm",
    ),
)


def _build_text_class(fields: Fields) -> Model:
    """Return the model of a ``llama4_text`` config: dense, with full attention only."""
    count = fields.layers()
    fields.texts("layer_types", count)
    if fields.items("no_rope_layers", count) is None:
        raise fields.fail("no_rope_layers", "missing; the model class needs it")
    return _TEXT_CLASS.build(fields)


def build_language_model(fields: Fields) -> Model:
    """Return the language model inside a ``llama4`` config, which has a head of its own."""
    fields.text("model_type")  # the class has no default for it
    hidden, count = fields.count("hidden_size"), fields.layers()
    if count < _FULL_INTERVAL:
        # The class looks at the cache of the first full layer for its mask.
        raise fields.fail("num_hidden_layers", f"{count}: the model class needs {_FULL_INTERVAL}")
    fields.texts("layer_types", count)
    fields.ignore("no_rope_layers", "no_rope_layer_interval", "moe_layers", "use_qk_norm")
    fields.ignore("attn_temperature_tuning", "floor_scale", "attn_scale")
    return blocks.decoder(
        fields, _layers(fields, hidden, count), blocks.ends(fields), makes_own_cache=True
    )


def _layers(fields: Fields, hidden: int, count: int) -> Iterator[Layer]:
    head_dim = fields.optional_count("head_dim") or blocks.derived_head_dim(fields)
    full = blocks.grouped_attention(fields, head_dim)
    chunk = fields.count("attention_chunk_size")
    chunked = replace(full, window=chunk, growth=Growth.CHUNKED)
    bias = fields.flag("attention_bias")
    modules = under("self_attn", blocks.attention(hidden, full, bias=bias))
    step = fields.count("interleave_moe_layer_step")
    dense = blocks.dense_mlp(hidden, fields.count("intermediate_size_mlp"), path="feed_forward")
    sparse = _experts(fields, hidden, used=step <= count)
    for index in range(count):
        mixer = chunked if (index + 1) % _FULL_INTERVAL else full
        yield blocks.decoder_layer(
            (mixer, modules), dense if (index + 1) % step else sparse, hidden
        )


def _experts(fields: Fields, hidden: int, *, used: bool) -> blocks.FeedForwardBlock:
    """One routed expert per token, and a shared one of the same width."""
    intermediate = fields.count("intermediate_size")
    experts = fields.count("num_local_experts", least=int(used))
    top_k = fields.count("num_experts_per_tok", least=0)
    if used and top_k != 1:
        raise fields.fail("num_experts_per_tok", f"{top_k}: the model class has one per token")
    spec = MixtureOfExperts(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=intermediate,
        weighted_inputs=True,
    )
    modules = (
        linear("router", hidden, experts, Part.ROUTER),
        *under("experts", switch_glu(hidden, intermediate, experts)),
        *under("shared_expert", gated_mlp(hidden, intermediate, part=Part.SHARED_EXPERTS)),
    )
    return spec, under("feed_forward", modules)


CLASSES = {"llama4_text": Irregular(builder=_build_text_class, since=(0, 28, 0))}
