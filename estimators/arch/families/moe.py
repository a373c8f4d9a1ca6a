"""Decoders of grouped-query attention with experts, one description for all (moe_models.py)."""

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families.dense_traits import HeadDim, QKNorm
from memfit.estimators.arch.families.moe_models import MODELS, MoE
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Modules, Part, array, linear, norm, under
from memfit.estimators.arch.specs import MixtureOfExperts


def build(fields: Fields) -> Model:
    """Return the model of a config of one of the rows' types."""
    traits = MODELS[fields.text("model_type")]
    fields = fields.with_overrides({}, traits.defaults)
    hidden, count = fields.count("hidden_size"), fields.layers()
    mixer = _attention(fields, traits, hidden)
    dense_layers = traits.dense(fields, count)
    sparse = len(dense_layers & set(range(count))) < count
    bias = traits.expert_bias is not None and fields.required_flag(traits.expert_bias)
    dense = blocks.dense_mlp(hidden, fields.count("intermediate_size"), bias=bias)
    block = _experts(fields, traits, hidden, bias=bias) if sparse else dense
    for key, value in traits.forced_values.items():
        fields.expect(key, value)
    fields.ignore("sliding_window", traits.experts, traits.top_k, traits.width, *traits.ignored)
    layer, dense_layer = (_layer(traits, mixer, each, hidden) for each in (block, dense))
    tied = traits.tied and fields.required_flag("tie_word_embeddings")
    outside = blocks.ends(fields, tied=tied, bias=traits.biased_ends)
    return blocks.decoder(
        fields,
        (dense_layer if index in dense_layers else layer for index in range(count)),
        blocks.at_8_bits(outside, traits.eight_bit),
    )


def _layer(
    traits: MoE, mixer: blocks.MixerBlock, block: blocks.FeedForwardBlock, hidden: int
) -> Layer:
    layer = blocks.decoder_layer(mixer, block, hidden, norm_bias=traits.biased_ends)
    return replace(layer, modules=blocks.at_8_bits(layer.modules, traits.eight_bit))


def _attention(fields: Fields, traits: MoE, hidden: int) -> blocks.MixerBlock:
    given = traits.head_dim is HeadDim.GIVEN or (
        traits.head_dim is HeadDim.OPTIONAL and fields.has("head_dim")
    )
    head_dim = fields.count("head_dim") if given else blocks.derived_head_dim(fields)
    has_norm = traits.qk_norm_key is None or fields.required_flag(traits.qk_norm_key)
    qk_norm = traits.qk_norm is not QKNorm.NONE and has_norm
    spec = blocks.grouped_attention(
        fields, head_dim, kv_optional=traits.kv_optional, qk_norm=qk_norm
    )
    bias = traits.bias if isinstance(traits.bias, bool) else fields.required_flag(traits.bias)
    modules = blocks.attention(hidden, spec, bias=bias, output_bias=bias and traits.output_bias)
    if qk_norm and traits.qk_norm is QKNorm.ALL_HEADS:
        widths = {"q_norm": spec.heads * head_dim, "k_norm": spec.kv_heads * head_dim}
        modules = (*modules[:-2], *(norm(name, width) for name, width in widths.items()))
    return spec, under("self_attn", modules)


def _experts(fields: Fields, traits: MoE, hidden: int, *, bias: bool) -> blocks.FeedForwardBlock:
    width = _size(fields, traits, traits.width) or fields.count("intermediate_size")
    shared = _size(fields, traits, traits.shared_width) if traits.shared_width else 0
    if traits.shared_count and not fields.null(traits.shared_count):
        shared = width * _size(fields, traits, traits.shared_count)
    spec = blocks.mixture(fields, traits.experts, traits.top_k, width=width, shared_width=shared)
    spec = replace(spec, float32_scores=traits.float32_scores, float32_router=traits.float32_router)
    path = "shared_expert" if traits.shared_width else "shared_experts"
    modules = blocks.expert_modules(
        spec, hidden, _router(traits, spec, hidden), shared=path, bias=bias
    )
    return spec, under(traits.block, modules)


def _size(fields: Fields, traits: MoE, key: str) -> int:
    return fields.count(key, least=0 if key in traits.zero_is_absent else 1)


def _router(traits: MoE, spec: MixtureOfExperts, hidden: int) -> Modules:
    modules: Modules = (linear(traits.router, hidden, spec.experts, Part.ROUTER),)
    if not traits.router_is_linear:
        modules = (array(traits.router, (spec.experts, hidden), Part.ROUTER),)
    if traits.correction:
        modules += (array(traits.correction, (spec.experts,), Part.ROUTER, float32=True),)
    if traits.shared_width:
        modules += (linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS),)
    return modules
