"""MiniCPM3: latent attention that caches keys and values of every head.

Source: mlx-lm models/minicpm3.py.
"""

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families.deepseek import latent_attention, latent_modules
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import under


def build(fields: Fields) -> Model:
    """Return the model of a ``minicpm3`` config; a value is as wide as hidden / heads."""
    hidden = fields.count("hidden_size")
    # Newer configs give the width of the rope under head_dim.
    fields.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "dim_model_base", "scale_depth")
    spec = latent_attention(
        fields, blocks.derived_head_dim(fields, given="v_head_dim"), expanded=True
    )
    fields.count("q_lora_rank")
    mixer = spec, under("self_attn", latent_modules(fields, spec, hidden))
    layer = blocks.decoder_layer(
        mixer, blocks.dense_mlp(hidden, fields.count("intermediate_size")), hidden
    )
    tied = fields.flag("tie_word_embeddings", False)
    return blocks.decoder(fields, (layer,) * fields.layers(), blocks.ends(fields, tied=tied))
