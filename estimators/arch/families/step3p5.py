"""Step 3.5: sliding and full attention with a gate a head, over experts.

Source: mlx-lm models/step3p5.py.
"""

from memfit.estimators.arch.caches import Growth
from memfit.estimators.arch.decoder import (
    FeedForwardBlock,
    at_8_bits,
    decoder_layer,
    dense_mlp,
    ends,
    expert_modules,
    mixture,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Modules, Part, array, attention, linear, norm, under
from memfit.estimators.arch.specs import Attention

_DEFAULTS = {
    "sliding_window": 512,
    "use_head_wise_attn_gate": True,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}


def build(fields: Fields) -> Model:
    """Return the model of a ``step3p5`` config; absent keys take the class's defaults."""
    fields = fields.revised({}, _DEFAULTS)
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    count = fields.layers()
    sliding, sparse = _sliding_layers(fields, count), _sparse_layers(fields, count)
    mixers = {False: _full(fields), True: _sliding(fields)}
    modules = {
        kind: under("self_attn", _attention_modules(fields, mixer, hidden))
        for kind, mixer in mixers.items()
    }
    blocks = {
        False: dense_mlp(hidden, fields.count("intermediate_size")),
        True: _experts(fields, hidden),
    }
    fields.expect("moe_every_n_layer", 1)
    fields.inert("swiglu_limits_shared", "yarn_only_types")
    # How the router scores, which the class takes from elsewhere or always does.
    fields.inert("use_moe_router_bias", "norm_expert_weight")
    return Model(
        model_type="step3p5",
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(
            decoder_layer(mixers[kind], modules[kind], blocks[index in sparse], hidden)
            for index, kind in enumerate(sliding)
        ),
        modules=ends(hidden, vocabulary),
        makes_own_cache=True,
    )


def _sliding_layers(fields: Fields, count: int) -> list[bool]:
    types = fields.texts("layer_types")
    if not types:
        return [index % 2 == 0 for index in range(count)]
    # The entries beyond the layers are of multi-token prediction, which mlx-lm drops.
    if len(types) < count:
        raise fields.fail("layer_types", f"expected {count} entries, one a layer, got {len(types)}")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise fields.fail("layer_types", f"unknown layer type {sorted(unknown)[0]!r:.40}")
    return [kind == "sliding_attention" for kind in types[:count]]


def _sparse_layers(fields: Fields, count: int) -> set[int]:
    if not fields.has("moe_layers_enum") or not fields.text("moe_layers_enum"):
        return set(range(1, count))
    try:
        return {int(index) for index in fields.text("moe_layers_enum").strip().split(",")}
    except ValueError:
        raise fields.fail("moe_layers_enum", "expected layer numbers with commas") from None


def _full(fields: Fields) -> Attention:
    heads, kv_heads = _heads(fields)
    head_dim = fields.count("head_dim")
    return Attention(
        heads=heads, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, qk_norm=True
    )


def _sliding(fields: Fields) -> Attention:
    """The sliding layers, whose heads another section may give."""
    own = fields.section("attention_other_setting")
    heads, kv_heads = _heads(own if fields.has("attention_other_setting") else fields)
    head_dim = fields.count("head_dim")
    for key in ("head_dim", "true_head_dim"):
        own.expect(key, head_dim)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        qk_norm=True,
        window=fields.count("sliding_window"),
        growth=Growth.ROTATING,
    )


def _heads(fields: Fields) -> tuple[int, int]:
    heads, groups = fields.count("num_attention_heads"), fields.count("num_attention_groups")
    fields.require_multiple("num_attention_heads", heads, "num_attention_groups", groups)
    return heads, groups


def _attention_modules(fields: Fields, spec: Attention, hidden: int) -> Modules:
    gate = (linear("g_proj", hidden, spec.heads),)
    return (
        *attention(hidden, spec.heads, spec.kv_heads, spec.key_dim),
        norm("q_norm", spec.key_dim),
        norm("k_norm", spec.key_dim),
        *(gate if fields.truth("use_head_wise_attn_gate") else ()),
    )


def _experts(fields: Fields, hidden: int) -> FeedForwardBlock:
    spec = mixture(
        fields,
        "moe_num_experts",
        "moe_top_k",
        width=fields.count("moe_intermediate_size"),
        shared_width=fields.count("share_expert_dim"),
    )
    router = (
        linear("gate.gate", hidden, spec.experts, Part.ROUTER),
        array("gate.router_bias", (spec.experts,), Part.ROUTER, float32=True),
    )
    modules = expert_modules(spec, hidden, router, shared="share_expert")
    return spec, at_8_bits(under("mlp", modules), ("mlp.gate.gate",))
