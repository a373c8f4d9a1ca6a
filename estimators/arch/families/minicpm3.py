"""MiniCPM3: latent attention whose keys and values are cached for every head.

Source: mlx-lm models/minicpm3.py.
"""

from memfit.estimators.arch.decoder import decoder_layer, dense_mlp, derived_head_dim, ends
from memfit.estimators.arch.families.deepseek import latent_attention, latent_modules
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import under


def build(fields: Fields) -> Model:
    """Return the model of a ``minicpm3`` config; a value is as wide as hidden // heads."""
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    # Newer configs say the width of the rope under head_dim.
    fields.inert("head_dim", "qk_head_dim", "num_key_value_heads", "dim_model_base", "scale_depth")
    value_dim = derived_head_dim(fields, hidden, told="v_head_dim")
    mixer = latent_attention(fields, value_dim, expanded=True)
    fields.count("q_lora_rank")
    layer = decoder_layer(
        mixer,
        under("self_attn", latent_modules(fields, mixer, hidden)),
        dense_mlp(hidden, fields.count("intermediate_size")),
        hidden,
    )
    tied = fields.flag("tie_word_embeddings", False)
    return Model(
        model_type="minicpm3",
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=(layer,) * fields.layers(),
        modules=ends(hidden, vocabulary, head=not tied),
    )
