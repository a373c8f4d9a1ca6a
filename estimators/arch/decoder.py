"""What most decoders share: heads, experts and the ends of the model, read and put together."""

from collections.abc import Iterable
from dataclasses import replace

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer
from memfit.estimators.arch.modules import (
    ROUTER_8BIT,
    Module,
    Modules,
    Part,
    array,
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
    Mixer,
    MixtureOfExperts,
)

FeedForwardBlock = tuple[FeedForward, Modules]


def derived_head_dim(fields: Fields, hidden: int, *, told: str = "head_dim") -> int:
    """Return hidden // heads, for classes that ask no key; the key ``told`` must not contradict."""
    heads = fields.count("num_attention_heads")
    head_dim = hidden // heads
    if not head_dim:
        raise fields.fail("num_attention_heads", f"{heads} heads in a hidden_size of {hidden}")
    fields.expect(told, head_dim)
    return head_dim


def grouped_query(
    fields: Fields, head_dim: int, *, kv_optional: bool = False, qk_norm: bool = False
) -> Attention:
    """Return full attention by the usual keys; absent KV heads are as many as heads if optional."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads if kv_optional else None)
    fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return Attention(
        heads=heads, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, qk_norm=qk_norm
    )


def mixture(
    fields: Fields,
    experts_key: str,
    top_k_key: str = "num_experts_per_tok",
    *,
    width: int,
    shared_width: int = 0,
    float32_scores: bool = False,
) -> MixtureOfExperts:
    """Return the experts of a layer; more chosen than there are is an error, as it is at run."""
    experts, top_k = fields.count(experts_key), fields.count(top_k_key)
    if top_k > experts:
        raise fields.fail(top_k_key, f"{top_k} is more than {experts_key} {experts}")
    return MixtureOfExperts(
        experts=experts,
        top_k=top_k,
        intermediate=width,
        shared_intermediate=shared_width,
        float32_scores=float32_scores,
    )


def expert_modules(
    spec: MixtureOfExperts,
    hidden: int,
    router: Modules,
    *,
    shared: str = "shared_experts",
    bias: bool = False,
) -> Modules:
    """Parameters of a sparse block: its router, stacked experts and the shared ones if any."""
    experts = switch_glu(hidden, spec.intermediate, spec.experts, bias=bias)
    modules = (*router, *under("switch_mlp", experts))
    if not spec.shared_intermediate:
        return modules
    part = Part.SHARED_EXPERTS
    return modules + under(
        shared, gated_mlp(hidden, spec.shared_intermediate, bias=bias, part=part)
    )


def corrected_router(hidden: int, experts: int) -> Modules:
    """DeepSeek-V3's router: an unquantised matrix and a float32 correction of its scores."""
    return (
        array("gate", (experts, hidden), Part.ROUTER),
        array("gate.e_score_correction_bias", (experts,), Part.ROUTER, float32=True),
    )


def dense_mlp(hidden: int, intermediate: int, *, bias: bool = False) -> FeedForwardBlock:
    """A gated MLP under ``mlp``."""
    modules = under("mlp", gated_mlp(hidden, intermediate, bias=bias))
    return DenseMLP(intermediate=intermediate), modules


def decoder_layer(
    mixer: Mixer,
    mixer_modules: Modules,
    feed_forward: FeedForwardBlock,
    hidden: int,
    *,
    norm_bias: bool = False,
) -> Layer:
    """A layer with a norm before its mixer and one before its feed-forward block."""
    spec, modules = feed_forward
    norms = (
        norm("input_layernorm", hidden, bias=norm_bias),
        norm("post_attention_layernorm", hidden, bias=norm_bias),
    )
    return Layer((mixer,), spec, mixer_modules + modules + norms)


def ends(
    hidden: int,
    vocabulary: int,
    *,
    head: bool = True,
    bias: bool = False,
    words: str = "embed_tokens",
) -> Modules:
    """Embedding, last norm and the head unless tied; ``bias`` is of norm and head."""
    modules: tuple[Module, ...] = (
        embedding(f"model.{words}", vocabulary, hidden),
        norm("model.norm", hidden, bias=bias),
    )
    if head:
        modules += (linear("lm_head", hidden, vocabulary, Part.HEAD, bias=bias),)
    return modules


def at_8_bits(modules: Iterable[Module], endings: tuple[str, ...]) -> Modules:
    """Mark what the class's ``quant_predicate`` keeps at 8 bits, by the ends of the paths."""
    return tuple(
        replace(module, predicate=ROUTER_8BIT) if module.path.endswith(endings) else module
        for module in modules
    )
