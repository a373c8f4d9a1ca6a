"""Step 3.5: sliding and full attention with a gate per head, over experts.

Source: mlx-lm models/step3p5.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families.windows import FULL, SLIDING
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, Part, array, linear, under
from memfit.estimators.arch.registry import DENSE, EXPERTS, Cut, Irregular, projections

_DEFAULTS = {
    "sliding_window": 512,
    "use_head_wise_attn_gate": True,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}


def _build(fields: Fields) -> Model:
    """Return the model of a ``step3p5`` config; absent keys take the class's defaults."""
    hidden, count = fields.count("hidden_size"), fields.layers()
    sliding, sparse = _sliding_layers(fields, count), _sparse_layers(fields, count)
    mixers = {kind: _mixer(fields, hidden, sliding=kind) for kind in (False, True)}
    dense, experts = (
        blocks.dense_mlp(hidden, fields.count("intermediate_size")),
        _experts(fields, hidden),
    )
    fields.expect("moe_every_n_layer", 1)
    fields.ignore("swiglu_limits_shared", "yarn_only_types")
    # How the router scores, which the class takes from elsewhere or always does.
    fields.ignore("use_moe_router_bias", "norm_expert_weight")
    return blocks.decoder(
        fields,
        (
            blocks.decoder_layer(mixers[kind], experts if index in sparse else dense, hidden)
            for index, kind in enumerate(sliding)
        ),
        blocks.ends(fields),
        makes_own_cache=True,
    )


def _sliding_layers(fields: Fields, count: int) -> list[bool]:
    types = fields.texts("layer_types")
    if not types:
        return [index % 2 == 0 for index in range(count)]
    # The entries beyond the layers are of multi-token prediction, which mlx-lm drops.
    if len(types) < count:
        raise fields.fail(
            "layer_types", f"expected {count} entries, one per layer, got {len(types)}"
        )
    fields.require_kinds("layer_types", types, (FULL, SLIDING))
    return [kind == SLIDING for kind in types[:count]]


def _sparse_layers(fields: Fields, count: int) -> set[int]:
    if not fields.has("moe_layers_enum") or not fields.text("moe_layers_enum"):
        return set(range(1, count))
    try:
        return {int(index) for index in fields.text("moe_layers_enum").strip().split(",")}
    except ValueError:
        raise fields.fail("moe_layers_enum", "expected layer numbers with commas") from None


def _mixer(fields: Fields, hidden: int, *, sliding: bool) -> blocks.MixerBlock:
    """Attention with a gate per head; another section may give the heads of sliding layers."""
    own, head_dim = fields, fields.count("head_dim")
    if sliding and fields.has("attention_other_setting"):
        own = fields.section("attention_other_setting")
        for key in ("head_dim", "true_head_dim"):
            own.expect(key, head_dim)
    spec = blocks.grouped_attention(
        own, head_dim, kv_heads_key="num_attention_groups", qk_norm=True
    )
    if sliding:
        spec = spec.sliding(fields.count("sliding_window"))
    modules = blocks.attention(hidden, spec)
    if fields.required_flag("use_head_wise_attn_gate"):
        spec = replace(spec, head_gate=True)
        modules = (linear("g_proj", hidden, spec.heads), *modules)
    return spec, under("self_attn", modules)


def _experts(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    spec = blocks.mixture(
        fields,
        "moe_num_experts",
        "moe_top_k",
        width=fields.count("moe_intermediate_size"),
        shared_width=fields.count("share_expert_dim"),
        float32_scores=True,
    )
    router = (
        linear("gate.gate", hidden, spec.experts, Part.ROUTER),
        array("gate.router_bias", (spec.experts,), Part.ROUTER, float32=True),
    )
    modules = blocks.expert_modules(spec, hidden, router, shared="share_expert")
    return spec, blocks.at_8_bits(under("mlp", modules), ("mlp.gate.gate",))


CLASSES = {
    "step3p5": Irregular(
        builder=_build,
        defaults=_DEFAULTS,
        drops=r"\.mtp",
        drops_later_layers=True,
        renames=(
            (r"\.moe\.(?=(gate|up|down)_proj\.)", ".mlp.switch_mlp."),
            (r"\.moe\.gate\.", ".mlp.gate.gate."),
            (r"\.moe\.router_bias", ".mlp.gate.router_bias"),
            # The class replaces only where the new name is not there already.
            (r"(?<!\.mlp)\.share_expert\.", ".mlp.share_expert."),
        ),
        expert_names={},
        tensor={
            **DENSE,
            "self_attn.g_proj": Cut.OUTPUTS,
            **EXPERTS,
            **projections("mlp.share_expert"),
        },
        since=(0, 30, 6),
    )
}
