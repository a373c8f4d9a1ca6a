"""Decoders of grouped-query attention over experts, as the rows of moe_rows.py tell."""

from dataclasses import replace

from memfit.estimators.arch.blocks import (
    FeedForwardBlock,
    MixerBlock,
    at_8_bits,
    attention,
    decoder,
    decoder_layer,
    dense_mlp,
    derived_head_dim,
    ends,
    expert_modules,
    grouped_attention,
    mixture,
)
from memfit.estimators.arch.families.moe_models import ROWS, HeadDim, QKNorm, Row
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Modules, Part, array, linear, norm, under
from memfit.estimators.arch.specs import MixtureOfExperts


def build(fields: Fields) -> Model:
    """Return the model of a config of one of the rows' types."""
    row = ROWS[fields.text("model_type")]
    fields = fields.with_overrides({}, row.defaults)
    hidden, count = fields.count("hidden_size"), fields.layers()
    mixer = _attention(fields, row, hidden)
    dense_layers = row.dense(fields, count)
    sparse = len(dense_layers & set(range(count))) < count
    bias = row.expert_bias is not None and fields.required_flag(row.expert_bias)
    dense = dense_mlp(hidden, fields.count("intermediate_size"), bias=bias)
    block = _experts(fields, row, hidden, bias=bias) if sparse else dense
    for key, value in row.forced_values.items():
        fields.expect(key, value)
    fields.ignore("sliding_window", row.experts, row.top_k, row.width, *row.ignored)
    layer, dense_layer = (_layer(row, mixer, each, hidden) for each in (block, dense))
    tied = row.tied and fields.required_flag("tie_word_embeddings")
    outside = ends(fields, tied=tied, bias=row.biased_ends)
    return decoder(
        fields,
        (dense_layer if index in dense_layers else layer for index in range(count)),
        at_8_bits(outside, row.eight_bit),
    )


def _layer(row: Row, mixer: MixerBlock, block: FeedForwardBlock, hidden: int) -> Layer:
    layer = decoder_layer(mixer, block, hidden, norm_bias=row.biased_ends)
    return replace(layer, modules=at_8_bits(layer.modules, row.eight_bit))


def _attention(fields: Fields, row: Row, hidden: int) -> MixerBlock:
    given = row.head_dim is HeadDim.REQUIRED or (
        row.head_dim is HeadDim.OPTIONAL and fields.has("head_dim")
    )
    head_dim = fields.count("head_dim") if given else derived_head_dim(fields)
    has_norm = row.qk_norm_key is None or fields.required_flag(row.qk_norm_key)
    qk_norm = row.qk_norm is not QKNorm.NONE and has_norm
    spec = grouped_attention(fields, head_dim, kv_optional=row.kv_optional, qk_norm=qk_norm)
    bias = row.bias if isinstance(row.bias, bool) else fields.required_flag(row.bias)
    modules = attention(hidden, spec, bias=bias, output_bias=bias and row.output_bias)
    if qk_norm and row.qk_norm is QKNorm.ALL_HEADS:
        widths = {"q_norm": spec.heads * head_dim, "k_norm": spec.kv_heads * head_dim}
        modules = (*modules[:-2], *(norm(name, width) for name, width in widths.items()))
    return spec, under("self_attn", modules)


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
