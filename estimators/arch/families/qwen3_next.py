"""Qwen3-Next: gated delta nets with a gated full attention every few layers, over experts.

Source: mlx-lm models/qwen3_next.py.
"""

from memfit.estimators.arch.blocks import FeedForwardBlock, decoder, ends
from memfit.estimators.arch.families.qwen_delta import (
    delta_layers,
    delta_spec,
    dense_block,
    experts_block,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Modules, array, convolution, linear, norm
from memfit.estimators.arch.specs import GatedDelta


def build(fields: Fields) -> Model:
    """Return the model of a ``qwen3_next`` config."""
    hidden = fields.count("hidden_size")
    delta = delta_spec(fields)
    return decoder(
        fields,
        delta_layers(fields, delta, _delta_modules(delta, hidden), _feed_forwards(fields)),
        ends(fields, tied=fields.flag("tie_word_embeddings", False)),
        makes_own_cache=True,
    )


def _feed_forwards(fields: Fields) -> list[FeedForwardBlock]:
    """Experts every ``decoder_sparse_step`` layers, but for the layers named dense."""
    step = fields.count("decoder_sparse_step")
    dense_layers = set(fields.counts("mlp_only_layers", least=0) or ())
    dense = dense_block(fields)
    sparse = experts_block(fields) if fields.count("num_experts", least=0) else dense
    return [
        dense if index in dense_layers or (index + 1) % step else sparse
        for index in range(fields.layers())
    ]


def _delta_modules(spec: GatedDelta, hidden: int) -> Modules:
    """Parameters of a gated delta net with its projections fused."""
    values = spec.value_heads * spec.value_dim
    return (
        linear("in_proj_qkvz", hidden, spec.conv_dim + values),
        linear("in_proj_ba", hidden, 2 * spec.value_heads),
        linear("out_proj", values, hidden),
        convolution("conv1d", spec.conv_dim, spec.kernel),
        array("dt_bias", (spec.value_heads,)),
        array("A_log", (spec.value_heads,)),
        norm("norm", spec.value_dim),
    )
