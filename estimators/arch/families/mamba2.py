"""Mamba-2.

Source: mlx-lm models/mamba2.py.
"""

from memfit.estimators.arch.families.hybrid import Mamba2, outside
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import norm, under


def build(fields: Fields) -> Model:
    """Return the model of a ``mamba2`` config."""
    # The class multiplies heads by their width and leaves these unread.
    fields.inert("intermediate_size", "expand", "chunk_size", "time_step_rank")
    hidden = fields.count("hidden_size")
    bias = fields.truth("use_bias")
    heads, groups = fields.count("num_heads"), fields.count("n_groups")
    fields.require_multiple("num_heads", heads, "n_groups", groups)
    mixer, modules = Mamba2(
        heads=heads,
        head_dim=fields.count("head_dim"),
        groups=groups,
        state=fields.optional_count("ssm_state_size") or fields.count("state_size"),
        kernel=fields.count("conv_kernel", least=2),
        conv_bias=fields.truth("use_conv_bias"),
        input_bias=bias,
        output_bias=bias,
    ).block(hidden)
    fields.inert("state_size")
    layer = Layer((mixer,), None, (*under("mixer", modules), norm("norm", hidden)))
    return Model(
        model_type="mamba2",
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        layers=(layer,) * fields.layers(),
        modules=outside(
            fields,
            tied=fields.truth("tie_word_embeddings"),
            embedding_path="backbone.embeddings",
            norm_path="backbone.norm_f",
        ),
        layers_path="backbone.layers",
        makes_own_cache=True,
    )
