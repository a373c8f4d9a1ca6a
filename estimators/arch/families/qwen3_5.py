"""Qwen3.5, dense or over experts: the layers of Qwen3-Next with split projections.

Source: mlx-lm models/qwen3_5.py; qwen3_5_moe.py adds only a renaming of weights.
"""

from memfit.estimators.arch.blocks import decoder, ends
from memfit.estimators.arch.families.qwen_delta import (
    delta_layers,
    delta_spec,
    dense_block,
    experts_block,
)
from memfit.estimators.arch.families.vision import with_towers
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Modules, array, convolution, linear, norm, under
from memfit.estimators.arch.specs import GatedDelta

# mlx-lm TextModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "linear_num_value_heads": 64,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 192,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 0,
}


def build(fields: Fields) -> Model:
    """Return the model of a ``qwen3_5`` or ``qwen3_5_moe`` config, with or without its wrapper."""
    text = _text_section(fields)
    delta = delta_spec(text)
    feed_forward = experts_block(text) if text.count("num_experts", least=0) else dense_block(text)
    # Every layer is sparse or none is; the class ignores these two.
    text.ignore("decoder_sparse_step", "intermediate_size", "attn_output_gate")
    layers = delta_layers(
        text,
        delta,
        _delta_modules(delta, text.count("hidden_size")),
        [feed_forward] * text.layers(),
    )
    outside = ends(text, tied=text.flag("tie_word_embeddings", False))
    model = decoder(
        text.with_overrides({"model_type": fields.text("model_type")}),
        layers,
        under("language_model", outside),
        layers_path="language_model.model.layers",
        makes_own_cache=True,
    )
    return with_towers(model, fields)


def _text_section(fields: Fields) -> Fields:
    if fields.null("text_config"):
        raise fields.fail("text_config", "expected an object, got null")
    text = fields
    if fields.has("text_config"):
        text = fields.section("text_config")
        if not text.has("tie_word_embeddings"):
            fields.expect("tie_word_embeddings", False)
    text = text.with_overrides({}, _DEFAULTS)
    if text.has("head_dim"):
        return text
    head_dim = text.count("hidden_size") // text.count("num_attention_heads")
    return text.with_overrides({"head_dim": head_dim})


def _delta_modules(spec: GatedDelta, hidden: int) -> Modules:
    """Parameters of a gated delta net with its projections split; the decay stays float32."""
    values = spec.value_heads * spec.value_dim
    return (
        linear("in_proj_qkv", hidden, spec.conv_dim),
        linear("in_proj_z", hidden, values),
        linear("in_proj_b", hidden, spec.value_heads),
        linear("in_proj_a", hidden, spec.value_heads),
        linear("out_proj", values, hidden),
        convolution("conv1d", spec.conv_dim, spec.kernel),
        array("dt_bias", (spec.value_heads,)),
        array("A_log", (spec.value_heads,), float32=True),
        norm("norm", spec.value_dim),
    )
