"""Mamba and Falcon-Mamba, whose extra norms have no parameters.

Source: mlx-lm models/mamba.py.
"""

from memfit.estimators.arch.families.hybrid import mamba, outside
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import norm, under
from memfit.estimators.base.units import ceil_div


def build(fields: Fields) -> Model:
    """Return the model of a ``mamba`` or ``falcon_mamba`` config."""
    fields = fields.revised({}, {"tie_word_embeddings": True})
    # Older names of sizes; the class takes the newer ones only.
    fields.inert("expand", "d_model", "d_inner", "n_layer")
    fields.inert("use_mambapy", "use_associative_scan")
    hidden = fields.count("hidden_size")
    mixer, modules = mamba(
        hidden,
        fields.count("intermediate_size"),
        fields.count("state_size"),
        fields.count("conv_kernel", least=2),
        fields.automatic_count("time_step_rank", ceil_div(hidden, 16)),
        conv_bias=fields.truth("use_conv_bias"),
        bias=fields.truth("use_bias"),
    )
    layer = Layer((mixer,), None, (*under("mixer", modules), norm("norm", hidden)))
    return Model(
        model_type=fields.text("model_type"),
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        layers=(layer,) * fields.layers(),
        modules=outside(
            fields,
            tied=fields.flag("tie_word_embeddings", False),
            embedding_path="backbone.embeddings",
            norm_path="backbone.norm_f",
        ),
        layers_path="backbone.layers",
        makes_own_cache=True,
    )
