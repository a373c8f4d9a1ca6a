"""Mamba-2.

Source: mlx-lm models/mamba2.py.
"""

from memfit.estimators.arch.blocks import decoder, ends, mamba2
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import norm, under


def build(fields: Fields) -> Model:
    """Return the model of a ``mamba2`` config."""
    # The class multiplies heads by their width and leaves these unread.
    fields.ignore("intermediate_size", "expand", "chunk_size", "time_step_rank")
    hidden = fields.count("hidden_size")
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
    layer = Layer((mixer,), None, (*under("mixer", mixer_modules), norm("norm", hidden)))
    modules = ends(
        fields,
        tied=fields.required_flag("tie_word_embeddings"),
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
