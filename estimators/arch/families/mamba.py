"""Mamba and Falcon-Mamba; the extra norms of the latter have no parameters.

Source: mlx-lm models/mamba.py.
"""

from memfit.estimators.arch.blocks import decoder, ends, mamba
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Modules, norm, under
from memfit.estimators.arch.specs import Mixer
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
    return backbone(fields, mixer, mixer_modules, tied=fields.flag("tie_word_embeddings", False))


def backbone(fields: Fields, mixer: Mixer, modules: Modules, *, tied: bool) -> Model:
    """Return the model of equal layers with a mixer and no feed-forward block."""
    norm_module = norm("norm", fields.count("hidden_size"))
    layer = Layer((mixer,), None, (*under("mixer", modules), norm_module))
    return decoder(
        fields,
        (layer,) * fields.layers(),
        ends(fields, tied=tied, embedding_path="backbone.embeddings", norm_path="backbone.norm_f"),
        layers_path="backbone.layers",
        makes_own_cache=True,
    )
