"""MiMo-V2-Flash: sliding and full attention of different shapes, over experts.

Source: mlx-lm models/mimo_v2_flash.py.
"""

from memfit.estimators.arch.caches import Growth
from memfit.estimators.arch.decoder import (
    FeedForwardBlock,
    corrected_router,
    decoder_layer,
    dense_mlp,
    ends,
    expert_modules,
    mixture,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Modules, array, linear, under
from memfit.estimators.arch.specs import Attention


def build(fields: Fields) -> Model:
    """Return the model of a ``mimo_v2_flash`` config."""
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    sliding, sparse = _switches(fields, "hybrid_layer_pattern"), _switches(fields, "moe_layer_freq")
    if set(sliding) != {0, 1}:
        problem = "expected both 0 (full) and 1 (sliding); mlx-lm looks for a layer of each"
        raise fields.fail("hybrid_layer_pattern", problem)
    mixers = {0: _full(fields), 1: _sliding(fields)}
    blocks = {0: dense_mlp(hidden, fields.count("intermediate_size"))}
    if 1 in sparse:
        blocks[1] = _experts(fields, hidden)
    modules = {
        kind: under("self_attn", _attention_modules(mixer, hidden))
        for kind, mixer in mixers.items()
    }
    # sliding_window_size is the one the class asks; routing is within groups of experts.
    fields.inert("sliding_window", "attention_chunk_size", "n_group", "topk_group")
    return Model(
        model_type="mimo_v2_flash",
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(
            decoder_layer(mixers[kind], modules[kind], blocks[experts], hidden)
            for kind, experts in zip(sliding, sparse, strict=True)
        ),
        modules=ends(hidden, vocabulary),
        makes_own_cache=True,
        kv_quantizable=False,
    )


def _switches(fields: Fields, key: str) -> list[int]:
    count = fields.layers()
    values = fields.counts(key, count, least=0)
    if values is None:
        raise fields.fail(key, "missing; the model class needs one entry a layer")
    return [int(value == 1) for value in values]


def _full(fields: Fields) -> Attention:
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=fields.count("head_dim"),
        value_dim=fields.count("v_head_dim"),
        sinks=fields.truth("add_full_attention_sink_bias"),
    )


def _sliding(fields: Fields) -> Attention:
    heads_key, kv_key = "swa_num_attention_heads", "swa_num_key_value_heads"
    heads, kv_heads = fields.count(heads_key), fields.count(kv_key)
    fields.require_multiple(heads_key, heads, kv_key, kv_heads)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=fields.count("swa_head_dim"),
        value_dim=fields.count("swa_v_head_dim"),
        sinks=fields.truth("add_swa_attention_sink_bias"),
        window=fields.count("sliding_window_size"),
        growth=Growth.ROTATING,
    )


def _attention_modules(spec: Attention, hidden: int) -> Modules:
    sinks = (array("attention_sink_bias", (spec.heads,)),) if spec.sinks else ()
    return (
        linear("q_proj", hidden, spec.heads * spec.key_dim),
        linear("k_proj", hidden, spec.kv_heads * spec.key_dim),
        linear("v_proj", hidden, spec.kv_heads * spec.value_dim),
        linear("o_proj", spec.heads * spec.value_dim, hidden),
        *sinks,
    )


def _experts(fields: Fields, hidden: int) -> FeedForwardBlock:
    width = fields.count("moe_intermediate_size")
    shared = fields.optional_count("n_shared_experts") or 0
    spec = mixture(
        fields,
        "n_routed_experts",
        width=width,
        shared_width=width * shared,
        float32_scores=True,
    )
    router = corrected_router(hidden, spec.experts)
    return spec, under("mlp", expert_modules(spec, hidden, router))
