"""Gemma 4 text: wider full layers between sliding ones; experts or shared caches by size.

Source: mlx-lm models/gemma4_text.py.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.blocks import grouped_attention, mixture, router_8bit
from memfit.estimators.arch.families.gemma3n import (
    layers_with_cache,
    per_layer_embeddings,
    per_layer_gate,
)
from memfit.estimators.arch.families.windows import FULL, SLIDING
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    Layer,
    Model,
    Modules,
    Part,
    array,
    embedding,
    gated_mlp,
    linear,
    norm,
    sandwich_norms,
    switch_glu,
    under,
)
from memfit.estimators.arch.registry import GATE_UP, Irregular
from memfit.estimators.arch.specs import Attention, DenseMLP, FeedForward, MixtureOfExperts

# mlx-lm gemma4_text.ModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}
# Rotary frequencies, and limits of activations.
DROPS = r"self_attn\.rotary_emb|(in|out)put_(max|min)"


def _build(fields: Fields) -> Model:
    hidden, count = fields.count("hidden_size"), fields.layers()
    vocabulary = fields.count("vocab_size")
    layer_width = _unless_null(fields, "hidden_size_per_layer_input")
    shared = fields.count("num_kv_shared_layers", least=0)
    modules: Modules = (*sandwich_norms(hidden), array("layer_scalar", (1,), Part.OTHER))
    outside: Modules = (embedding("embed_tokens", vocabulary, hidden), norm("norm", hidden))
    if layer_width:
        modules += per_layer_gate(hidden, layer_width)
        outside += per_layer_embeddings(fields, hidden, count * layer_width, layer_width)
    outside = under("model", outside)
    if not _switch(fields, "tie_word_embeddings"):
        outside += (linear("lm_head", hidden, vocabulary, Part.HEAD),)
    layers = tuple(_layers(fields, hidden, _kinds(fields, count), shared, modules))
    _check_overrides(fields, layers)
    fields.ignore("use_bidirectional_attention", "vocab_size_per_layer_input")
    return Model(
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=layers,
        modules=outside,
        makes_own_cache=True,
        # A layer that shares a quantised cache gets packed keys where it expects plain ones.
        kv_quantizable=shared == 0,
    )


def _kinds(fields: Fields, count: int) -> list[str]:
    kinds = fields.texts("layer_types", count)
    interval = fields.count("sliding_window_pattern")
    if kinds is None:
        return [SLIDING if (index + 1) % interval else FULL for index in range(count)]
    fields.require_kinds("layer_types", kinds, (FULL, SLIDING))
    return kinds


def _layers(
    fields: Fields, hidden: int, kinds: list[str], shared: int, modules: Modules
) -> Iterator[Layer]:
    mixers = _mixers(fields)
    keys_are_values = {FULL: fields.flag("attention_k_eq_v", False), SLIDING: False}
    intermediate = fields.count("intermediate_size")
    width_of_sharers = intermediate * (2 if _switch(fields, "use_double_wide_mlp") else 1)
    experts = _experts(fields, hidden) if fields.flag("enable_moe_block", False) else None
    own = layers_with_cache(fields, kinds, shared)
    for index, kind in enumerate(kinds):
        owns_cache = index < own
        mixer = replace(mixers[kind], owns_cache=owns_cache)
        width = intermediate if owns_cache else width_of_sharers
        feed_forward: FeedForward = DenseMLP(intermediate=width, activation_arrays=1)
        parts = _attention_modules(mixer, hidden, keys_are_values[kind])
        parts += under("mlp", gated_mlp(hidden, width))
        if experts:
            feed_forward = replace(experts[0], shared_intermediate=width)
            parts += experts[1]
        yield Layer((mixer,), feed_forward, modules + parts)


def _mixers(fields: Fields) -> dict[str, Attention]:
    head_dim = fields.count("head_dim")
    sliding = replace(grouped_attention(fields, head_dim, qk_norm=True), value_norm=True)
    full_dim = _unless_null(fields, "global_head_dim") or head_dim
    full = replace(sliding, key_dim=full_dim, value_dim=full_dim)
    full_kv_heads = fields.optional_count("num_global_key_value_heads")
    if full_kv_heads is not None and fields.flag("attention_k_eq_v", False):
        fields.require_multiple(
            "num_attention_heads", full.heads, "num_global_key_value_heads", full_kv_heads
        )
        full = replace(full, kv_heads=full_kv_heads)
    return {FULL: full, SLIDING: sliding.sliding(fields.count("sliding_window"))}


def _attention_modules(spec: Attention, hidden: int, keys_are_values: bool) -> Modules:
    """Parameters of a layer; where it reads another's cache, the class drops its keys at load."""
    queries, keys = spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim
    own: Modules = (linear("k_proj", hidden, keys), norm("k_norm", spec.key_dim))
    if not keys_are_values:
        own += (linear("v_proj", hidden, keys),)
    if not spec.owns_cache:
        own = tuple(replace(module, quantizable=False, loaded=False) for module in own)
    modules = (
        linear("q_proj", hidden, queries),
        norm("q_norm", spec.key_dim),
        *own,
        linear("o_proj", queries, hidden),
    )
    return under("self_attn", modules)


def _experts(fields: Fields, hidden: int) -> tuple[MixtureOfExperts, Modules]:
    """Routed experts in addition to the dense MLP, with norms of their own."""
    width = fields.count("moe_intermediate_size")
    spec = mixture(fields, "num_experts", "top_k_experts", width=width)
    spec = replace(spec, activation_arrays=1, own_norms=True)
    return spec, (
        *router_8bit("router.proj", hidden, spec.experts),
        array("router.scale", (hidden,), Part.ROUTER),
        array("router.per_expert_scale", (spec.experts,), Part.ROUTER),
        *under("experts.switch_glu", switch_glu(hidden, spec.intermediate, spec.experts)),
        norm("post_feedforward_layernorm_1", hidden),
        norm("post_feedforward_layernorm_2", hidden),
        norm("pre_feedforward_layernorm_2", hidden),
    )


def _check_overrides(fields: Fields, layers: tuple[Layer, ...]) -> None:
    """Refuse what transformers 5 writes of single layers where the class builds otherwise."""
    overrides = fields.section("per_layer_config")
    for key in overrides.unread():
        if not key.isdecimal() or int(key) >= len(layers):
            raise overrides.fail(key, f"expected the number of one of {len(layers)} layers")
        mixer: Any = layers[int(key)].mixers[0]
        override = overrides.section(key)
        for name, built in (("head_dim", mixer.key_dim), ("num_key_value_heads", mixer.kv_heads)):
            if override.count(name, built) != built:
                raise override.fail(name, f"the model class ignores it and builds {built}")


def _unless_null(fields: Fields, key: str) -> int:
    """A null switches off what an absent key leaves at the class's default."""
    return 0 if fields.null(key) else fields.count(key, least=0)


def _switch(fields: Fields, key: str) -> bool:
    return not fields.null(key) and fields.flag(key)


CLASSES = {
    "gemma4_text": Irregular(
        builder=_build, defaults=_DEFAULTS, drops=DROPS, joined=GATE_UP, since=(0, 31, 2)
    )
}
