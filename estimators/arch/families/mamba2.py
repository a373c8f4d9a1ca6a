"""Mamba-2.

Source: mlx-lm models/mamba2.py.
"""

from memfit.estimators.arch.blocks import mamba2
from memfit.estimators.arch.families.mamba import backbone
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model


def build(fields: Fields) -> Model:
    """Return the model of a ``mamba2`` config."""
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
    return backbone(fields, mixer, mixer_modules, tied=tied)
