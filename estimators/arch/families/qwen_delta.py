"""What Qwen3-Next and Qwen3.5 share: gated delta nets with a full attention every few layers.

Source: mlx-lm models/qwen3_next.py; qwen3_5.py imports its attention and expert classes.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer
from memfit.estimators.arch.modules import ROUTER_8BIT, Modules, Part, linear, under
from memfit.estimators.arch.specs import GatedDelta


def delta_layers(
    fields: Fields,
    delta: GatedDelta,
    delta_modules: Modules,
    feed_forwards: Sequence[blocks.FeedForwardBlock],
) -> tuple[Layer, ...]:
    """Layers with the given feed-forward blocks; each ``full_attention_interval``-th attends."""
    hidden = fields.count("hidden_size")
    spec = blocks.grouped_attention(fields, fields.count("head_dim"), qk_norm=True)
    # The doubled query projection holds the output gate.
    spec = replace(spec, output_gate=True)
    bias = fields.flag("attention_bias", False)
    full = spec, under("self_attn", blocks.attention(hidden, spec, bias=bias))
    linear_mixer = delta, under("linear_attn", delta_modules)
    return tuple(
        blocks.decoder_layer(full if is_full else linear_mixer, feed_forward, hidden)
        for is_full, feed_forward in zip(
            _full_attention(fields, len(feed_forwards)), feed_forwards, strict=True
        )
    )


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


def experts_block(fields: Fields) -> blocks.FeedForwardBlock:
    """Routed experts with one gated shared expert."""
    hidden = fields.count("hidden_size")
    spec = blocks.mixture(
        fields,
        "num_experts",
        width=fields.count("moe_intermediate_size"),
        shared_width=fields.count("shared_expert_intermediate_size"),
    )
    modules = blocks.expert_modules(
        spec, hidden, blocks.router_8bit("gate", hidden, spec.experts), shared="shared_expert"
    )
    gate = linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS, predicate=ROUTER_8BIT)
    return spec, under("mlp", (*modules, gate))


def dense_block(fields: Fields) -> blocks.FeedForwardBlock:
    """The dense MLP of layers without experts."""
    return blocks.dense_mlp(fields.count("hidden_size"), fields.count("intermediate_size"))
