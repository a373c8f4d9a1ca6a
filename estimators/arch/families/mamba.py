"""Mamba and Falcon-Mamba, whose extra norms have no parameters.

Source: mlx-lm models/mamba.py.
"""

from memfit.estimators.arch.blocks import decoder, ends, mamba
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import norm, under
from memfit.estimators.base.units import ceil_div


def build(fields: Fields) -> Model:
    """Return the model of a ``mamba`` or ``falcon_mamba`` config."""
    fields = fields.with_overrides({}, {"tie_word_embeddings": True})
    # Older names of sizes; the class takes the newer ones only.
    fields.ignore("expand", "d_model", "d_inner", "n_layer")
    fields.ignore("use_mambapy", "use_associative_scan")
    hidden = fields.count("hidden_size")
    mixer, mixer_modules = mamba(
        hidden,
        fields.count("intermediate_size"),
        fields.count("state_size"),
        fields.count("conv_kernel", least=2),
        fields.count_or_auto("time_step_rank", ceil_div(hidden, 16)),
        conv_bias=fields.required_flag("use_conv_bias"),
        bias=fields.required_flag("use_bias"),
    )
    layer = Layer((mixer,), None, (*under("mixer", mixer_modules), norm("norm", hidden)))
    modules = ends(
        fields,
        tied=fields.flag("tie_word_embeddings", False),
        embedding_path="backbone.embeddings",
        norm_path="backbone.norm_f",
    )
    return decoder(
        fields,
        (layer,) * fields.layers(),
        modules,
        layers_path="backbone.layers",
        makes_own_cache=True,
    )
