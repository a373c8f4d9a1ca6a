"""Decoders of grouped-query attention over experts, as the rows of moe_rows.py tell."""

from dataclasses import replace

from memfit.estimators.arch.decoder import (
    FeedForwardBlock,
    at_8_bits,
    decoder_layer,
    dense_mlp,
    derived_head_dim,
    ends,
    expert_modules,
    grouped_query,
    mixture,
)
from memfit.estimators.arch.families.moe_models import ROWS, HeadDim, QKNorm, Row
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Modules, Part, array, attention, linear, norm, under
from memfit.estimators.arch.specs import Attention, MixtureOfExperts


def build(fields: Fields) -> Model:
    """Return the model of a config of one of the rows' types."""
    model_type = fields.text("model_type")
    row = ROWS[model_type]
    fields = fields.revised({}, row.defaults)
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    mixer = _attention(fields, row, hidden)
    mixer_modules = under("self_attn", _attention_modules(fields, row, mixer, hidden))
    count = fields.layers()
    dense_layers = row.dense(fields, count)
    sparse = len(dense_layers & set(range(count))) < count
    bias = row.expert_bias is not None and fields.truth(row.expert_bias)
    dense = dense_mlp(hidden, fields.count("intermediate_size"), bias=bias)
    block = _experts(fields, row, hidden, bias=bias) if sparse else dense
    for key, value in row.unasked.items():
        fields.expect(key, value)
    fields.inert("sliding_window", row.experts, row.top_k, row.width, *row.inert)
    layer, dense_layer = (
        _layer(row, mixer, mixer_modules, feed_forward, hidden) for feed_forward in (block, dense)
    )
    tied = row.tied and fields.truth("tie_word_embeddings")
    outside = ends(hidden, vocabulary, head=not tied, bias=row.biased_ends)
    return Model(
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(dense_layer if i in dense_layers else layer for i in range(count)),
        modules=at_8_bits(outside, row.eight_bit),
    )


def _layer(
    row: Row, mixer: Attention, mixer_modules: Modules, block: FeedForwardBlock, hidden: int
) -> Layer:
    layer = decoder_layer(mixer, mixer_modules, block, hidden, norm_bias=row.biased_ends)
    return replace(layer, modules=at_8_bits(layer.modules, row.eight_bit))


def _attention(fields: Fields, row: Row, hidden: int) -> Attention:
    if row.head_dim is HeadDim.DERIVED or (
        row.head_dim is HeadDim.OPTIONAL and not fields.has("head_dim")
    ):
        head_dim = derived_head_dim(fields, hidden)
    else:
        head_dim = fields.count("head_dim")
    has_norm = row.qk_norm_key is None or fields.truth(row.qk_norm_key)
    qk_norm = row.qk_norm is not QKNorm.NONE and has_norm
    return grouped_query(fields, head_dim, kv_optional=row.kv_optional, qk_norm=qk_norm)


def _attention_modules(fields: Fields, row: Row, spec: Attention, hidden: int) -> Modules:
    bias = row.bias if isinstance(row.bias, bool) else fields.truth(row.bias)
    modules = attention(
        hidden,
        spec.heads,
        spec.kv_heads,
        spec.key_dim,
        bias=bias,
        output_bias=bias and row.output_bias,
    )
    if not spec.qk_norm:
        return modules
    wide = row.qk_norm is QKNorm.ALL_HEADS
    queries, keys = (spec.heads, spec.kv_heads) if wide else (1, 1)
    return (
        *modules,
        norm("q_norm", queries * spec.key_dim),
        norm("k_norm", keys * spec.key_dim),
    )


def _experts(fields: Fields, row: Row, hidden: int, *, bias: bool) -> FeedForwardBlock:
    width = _size(fields, row, row.width) or fields.count("intermediate_size")
    shared = _size(fields, row, row.shared_width) if row.shared_width else 0
    if row.shared_count and not fields.null(row.shared_count):
        shared = width * _size(fields, row, row.shared_count)
    spec = mixture(fields, row.experts, row.top_k, width=width, shared_width=shared)
    spec = replace(spec, float32_scores=row.float32_scores)
    path = "shared_expert" if row.shared_width else "shared_experts"
    modules = expert_modules(spec, hidden, _router(row, spec, hidden), shared=path, bias=bias)
    return spec, under(row.block, modules)


def _size(fields: Fields, row: Row, key: str) -> int:
    return fields.count(key, least=0 if key in row.zero_is_absent else 1)


def _router(row: Row, spec: MixtureOfExperts, hidden: int) -> Modules:
    modules: Modules = (linear(row.router, hidden, spec.experts, Part.ROUTER),)
    if not row.router_is_linear:
        modules = (array(row.router, (spec.experts, hidden), Part.ROUTER),)
    if row.correction:
        modules += (array(row.correction, (spec.experts,), Part.ROUTER, float32=True),)
    if row.shared_width:
        modules += (linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS),)
    return modules
