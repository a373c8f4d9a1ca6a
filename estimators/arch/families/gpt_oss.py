"""gpt-oss: sliding windows and full attention with sinks, over experts with biases.

Source: mlx-lm models/gpt_oss.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families.windows import FULL, SLIDING
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model, Part, array, linear, switch_glu, under
from memfit.estimators.arch.registry import HEADS, Cut, Irregular, projections
from memfit.estimators.arch.specs import Attention

_DEFAULTS = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}


def _build(fields: Fields) -> Model:
    """Return the model of a ``gpt_oss`` config; absent keys take the class's defaults."""
    fields.expect("attention_bias", True)
    # An older name of num_experts_per_tok, which the class does not read.
    fields.expect("experts_per_token", fields.count("num_experts_per_tok"))
    full = replace(blocks.grouped_attention(fields, fields.count("head_dim")), sinks=True)
    sliding = full.sliding(fields.count("sliding_window"))
    layers = {mixer.kind: _layer(fields, mixer) for mixer in (full, sliding)}
    return blocks.decoder(
        fields,
        (layers[kind] for kind in _layer_types(fields)),
        blocks.ends(fields),
        makes_own_cache=True,
        kv_quantizable=False,
    )


def _layer_types(fields: Fields) -> list[str]:
    count = fields.layers()
    types = fields.texts("layer_types", count)
    if not types:
        if count % 2:
            problem = f"{count} is odd; without layer_types mlx-lm would leave the last layer out"
            raise fields.fail("num_hidden_layers", problem)
        return [SLIDING, FULL] * (count // 2)
    fields.require_kinds("layer_types", types, (FULL, SLIDING), (FULL, SLIDING))
    return types


def _layer(fields: Fields, mixer: Attention) -> Layer:
    hidden, width = fields.count("hidden_size"), fields.count("intermediate_size")
    modules = (*blocks.attention(hidden, mixer, bias=True), array("sinks", (mixer.heads,)))
    spec = blocks.mixture(fields, "num_local_experts", width=width)
    experts = (
        linear("router", hidden, spec.experts, Part.ROUTER, bias=True),
        *under("experts", switch_glu(hidden, width, spec.experts, bias=True)),
    )
    block = spec, blocks.at_8_bits(under("mlp", experts), ("router",))
    return blocks.decoder_layer((mixer, under("self_attn", modules)), block, hidden)


CLASSES = {
    "gpt_oss": Irregular(
        builder=_build,
        defaults=_DEFAULTS,
        splits_mxfp4=True,
        tensor={**HEADS, **projections("mlp.experts"), "self_attn.sinks": Cut.SLICE},
        since=(0, 26, 3),
    )
}
