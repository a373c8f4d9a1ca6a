"""What Qwen3-Next and Qwen3.5 share: gated delta nets with a full attention every few layers.

Source: mlx-lm models/qwen3_next.py, whose attention and expert classes qwen3_5.py imports.
"""

from collections.abc import Sequence
from dataclasses import replace

from memfit.estimators.arch.families.hybrid import grouped_attention
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer
from memfit.estimators.arch.modules import (
    ROUTER_8BIT,
    Modules,
    Part,
    attention,
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
    GatedDelta,
    MixtureOfExperts,
)

FeedForwardBlock = tuple[FeedForward, Modules]


def delta_layers(
    fields: Fields,
    delta: GatedDelta,
    delta_modules: Modules,
    feed_forwards: Sequence[FeedForwardBlock],
) -> tuple[Layer, ...]:
    """Layers with the given feed-forward blocks; each ``full_attention_interval``-th attends."""
    hidden = fields.count("hidden_size")
    full_mixer = replace(
        grouped_attention(fields, fields.count("head_dim"), qk_norm=True), output_gate=True
    )
    linear_modules = under("linear_attn", delta_modules)
    full_modules = under("self_attn", _attention_modules(fields, full_mixer, hidden))
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    layers = []
    for full, (feed_forward, feed_modules) in zip(
        _full_attention(fields, len(feed_forwards)), feed_forwards, strict=True
    ):
        modules = (full_modules if full else linear_modules) + feed_modules + norms
        layers.append(Layer((full_mixer if full else delta,), feed_forward, modules))
    return tuple(layers)


def _full_attention(fields: Fields, count: int) -> list[bool]:
    """Whether each layer attends fully; mlx-lm reads the interval only, never the list.

    For its masks the class looks at a layer of each kind, so that there must be both.
    """
    interval = fields.count("full_attention_interval", 4, least=2, most=count)
    full = [index % interval == interval - 1 for index in range(count)]
    for index, kind in enumerate(fields.texts("layer_types", count) or ()):
        if kind != ("full_attention" if full[index] else "linear_attention"):
            raise fields.fail(
                f"layer_types[{index}]",
                f"{kind[:40]!r}, but mlx-lm goes by full_attention_interval {interval}",
            )
    return full


def _attention_modules(fields: Fields, spec: Attention, hidden: int) -> Modules:
    """Grouped-query attention whose doubled query projection holds the output gate."""
    bias = fields.flag("attention_bias", False)
    return (
        linear("q_proj", hidden, 2 * spec.heads * spec.key_dim, bias=bias),
        *attention(hidden, spec.heads, spec.kv_heads, spec.key_dim, bias=bias)[1:],
        norm("q_norm", spec.key_dim),
        norm("k_norm", spec.key_dim),
    )


def delta_spec(fields: Fields) -> GatedDelta:
    """The gated delta net layers."""
    spec = GatedDelta(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        kernel=fields.count("linear_conv_kernel_dim", least=2),
    )
    if spec.value_heads % spec.key_heads:
        raise fields.fail(
            "linear_num_value_heads",
            f"{spec.value_heads} is not a multiple of linear_num_key_heads {spec.key_heads}",
        )
    return spec


def experts_block(fields: Fields) -> FeedForwardBlock:
    """Routed experts with one gated shared expert."""
    hidden = fields.count("hidden_size")
    spec = MixtureOfExperts(
        experts=fields.count("num_experts"),
        top_k=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        shared_intermediate=fields.count("shared_expert_intermediate_size"),
    )
    if spec.top_k > spec.experts:
        raise fields.fail("num_experts_per_tok", f"{spec.top_k} of {spec.experts} experts")
    shared = gated_mlp(hidden, spec.shared_intermediate, part=Part.SHARED_EXPERTS)
    return spec, (
        linear("mlp.gate", hidden, spec.experts, Part.ROUTER, predicate=ROUTER_8BIT),
        *under("mlp.switch_mlp", switch_glu(hidden, spec.intermediate, spec.experts)),
        *under("mlp.shared_expert", shared),
        linear("mlp.shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS, predicate=ROUTER_8BIT),
    )


def dense_block(fields: Fields) -> FeedForwardBlock:
    """The dense MLP of layers without experts."""
    intermediate = fields.count("intermediate_size")
    modules = gated_mlp(fields.count("hidden_size"), intermediate)
    return DenseMLP(intermediate=intermediate), under("mlp", modules)
