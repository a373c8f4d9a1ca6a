"""Gemma 3 text: sliding windows with a full attention every few layers.

Source: mlx-lm models/gemma3_text.py.
"""

from memfit.estimators.arch.families import windows
from memfit.estimators.arch.families.dense import describe
from memfit.estimators.arch.families.dense_traits import Dense, HeadDim, Key, QKNorm
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model

# mlx-lm gemma3_text.ModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}

_TRAITS = Dense(
    head_dim=HeadDim.GIVEN,
    qk_norm=QKNorm.HEAD,
    activation_arrays=1,
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    # The class always makes a head and drops it at load when the checkpoint has none.
    tied=Key("tie_word_embeddings", True),
    # It goes by the pattern alone, whatever layer_types says.
    windows=windows.by_interval,
    makes_own_cache=True,
    ignored=("query_pre_attn_scalar", "use_bidirectional_attention"),
)


def build(fields: Fields) -> Model:
    """Return the model of a ``gemma3_text`` config."""
    fields = fields.with_overrides({}, _DEFAULTS)
    fields.texts("layer_types", fields.layers())
    return describe(fields, _TRAITS, "gemma3_text")
