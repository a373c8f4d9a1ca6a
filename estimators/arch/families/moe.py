"""Decoders of grouped-query attention with experts: one description for all, by their traits.

Source: the mlx-lm module of the model type's name. The defaults are what most of them share.
"""

from collections.abc import Callable, Mapping

from msgspec import field
from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.class_row import ClassRow
from memfit.estimators.arch.families.dense import HeadDim, QKNorm
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Modules, Part, array, linear, norm, under
from memfit.estimators.arch.specs import MixtureOfExperts


class MoE(ClassRow, frozen=True, kw_only=True):
    """A class with attention that is all alike and experts; every path and key as it has it."""

    experts: str
    """The key of their number."""
    top_k: str = "num_experts_per_tok"
    width: str = "intermediate_size"
    """The key of the width of one expert."""
    shared_width: str | None = None
    """The key of the width of the shared expert."""
    shared_count: str | None = None
    """The key of how many shared experts there are, each as wide as a routed one."""
    head_dim: HeadDim = HeadDim.DERIVED
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_key: str | None = None
    """The key that turns the norm on."""
    kv_optional: bool = False
    """Whether absent KV heads are as many as heads."""
    bias: bool | str = False
    """Of queries, keys and values: whether there is one, or the key that says it."""
    output_bias: bool = True
    """Whether the output has it too."""
    expert_bias: str | None = None
    """The key of a bias in MLPs and experts."""
    routed_bias: bool = True
    """Whether routed experts have that bias too."""
    block: str = "mlp"
    stack: str = "switch_mlp"
    """The path of the stacked experts in the block."""
    router: str = "gate"
    router_is_linear: bool = True
    correction: str | None = None
    """The path of the router's correction of its scores."""
    float32_correction: bool = True
    """Whether the correction stays float32 for any type of the model."""
    float32_scores: bool = False
    """As `MixtureOfExperts.float32_scores`."""
    float32_router: bool = False
    """As `MixtureOfExperts.float32_router`."""
    dense: Callable[[Fields, int], frozenset[int]] = lambda fields, count: frozenset()
    """Which layers are dense."""
    tied: bool = False
    """Whether the class reads ``tie_word_embeddings``."""
    biased_ends: bool = False
    """Whether norms are LayerNorms and they and the head have biases."""
    eight_bit: tuple[str, ...] = ()
    """Path endings of the class's ``quant_predicate``."""
    defaults: Mapping[str, int | bool] = field(default_factory=dict)
    """The class's own values for absent keys."""
    forced_values: Mapping[str, int | bool] = field(default_factory=dict)
    """What it takes for any value in the config."""
    zero_is_absent: tuple[str, ...] = ()
    """Keys where a 0 is no size."""
    ignored: tuple[str, ...] = ()
    """Keys that change no byte."""

    def build(self, fields: Fields) -> Model:
        """Return the model of a config."""
        return _describe(fields.with_overrides({}, self.defaults), self)


def _describe(fields: Fields, traits: MoE) -> Model:
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
    modules = blocks.expert_modules(
        spec,
        hidden,
        _router(traits, spec, hidden),
        stack=traits.stack,
        shared="shared_expert" if traits.shared_width else "shared_experts",
        bias=bias,
        routed_bias=bias and traits.routed_bias,
    )
    return spec, under(traits.block, modules)


def _size(fields: Fields, traits: MoE, key: str) -> int:
    return fields.count(key, least=0 if key in traits.zero_is_absent else 1)


def _router(traits: MoE, spec: MixtureOfExperts, hidden: int) -> Modules:
    modules: Modules = (linear(traits.router, hidden, spec.experts, Part.ROUTER),)
    if not traits.router_is_linear:
        modules = (array(traits.router, (spec.experts, hidden), Part.ROUTER),)
    if traits.correction:
        modules += (
            array(
                traits.correction, (spec.experts,), Part.ROUTER, float32=traits.float32_correction
            ),
        )
    if traits.shared_width:
        modules += (linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS),)
    return modules
