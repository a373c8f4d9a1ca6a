"""Mamba, Mamba-2, and Falcon-Mamba, whose extra norms have no parameters.

Source: mlx-lm models/mamba.py and mamba2.py.
"""

from memfit.estimators.arch.blocks import decoder, ends, mamba, mamba2
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model, Modules, norm, under
from memfit.estimators.arch.registry import Irregular
from memfit.estimators.arch.specs import Mixer
from memfit.estimators.base.units import ceil_div


def _build_mamba(fields: Fields) -> Model:
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
    return _backbone(fields, mixer, mixer_modules, tied=fields.flag("tie_word_embeddings", False))


def _build_mamba2(fields: Fields) -> Model:
    # The class multiplies heads by their width and leaves these unread.
    fields.ignore("intermediate_size", "expand", "chunk_size", "time_step_rank")
    bias = fields.required_flag("use_bias")
    mixer, mixer_modules = mamba2(
        fields,
        heads_key="num_heads",
        head_dim_key="head_dim",
        groups_key="n_groups",
        state_key="ssm_state_size" if fields.has("ssm_state_size") else "state_size",
        kernel_key="conv_kernel",
        conv_bias=fields.required_flag("use_conv_bias"),
        input_bias=bias,
        output_bias=bias,
    )
    fields.ignore("state_size")
    tied = fields.required_flag("tie_word_embeddings")
    return _backbone(fields, mixer, mixer_modules, tied=tied)


def _backbone(fields: Fields, mixer: Mixer, modules: Modules, *, tied: bool) -> Model:
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


_MAMBA = Irregular(builder=_build_mamba, defaults={"tie_word_embeddings": True})
CLASSES = {
    "falcon_mamba": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": Irregular(builder=_build_mamba2, since=(0, 28, 0)),
}
