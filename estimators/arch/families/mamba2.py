"""Mamba-2.

Source: mlx-lm models/mamba2.py.
"""

from memfit.estimators.arch.blocks import Mamba2, decoder, ends
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import norm, under


def build(fields: Fields) -> Model:
    """Return the model of a ``mamba2`` config."""
    # The class multiplies heads by their width and leaves these unread.
    fields.ignore("intermediate_size", "expand", "chunk_size", "time_step_rank")
    hidden = fields.count("hidden_size")
    bias = fields.required_flag("use_bias")
    heads, groups = fields.count("num_heads"), fields.count("n_groups")
    fields.require_multiple("num_heads", heads, "n_groups", groups)
    mixer, mixer_modules = Mamba2(
        heads=heads,
        head_dim=fields.count("head_dim"),
        groups=groups,
        state=fields.optional_count("ssm_state_size") or fields.count("state_size"),
        kernel=fields.count("conv_kernel", least=2),
        conv_bias=fields.required_flag("use_conv_bias"),
        input_bias=bias,
        output_bias=bias,
    ).block(hidden)
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
