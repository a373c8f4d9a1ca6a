"""RecurrentGemma (Griffin): RG-LRU blocks with a local attention now and then.

Source: mlx-lm models/recurrent_gemma.py.
"""

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, array, convolution, linear, under
from memfit.estimators.arch.registry import Irregular
from memfit.estimators.arch.specs import DenseMLP, Recurrent, Scan, StateBuffer

_KINDS = ("attention", "recurrent")
_KERNEL = 4  # the class reads no key for it


def _build(fields: Fields) -> Model:
    hidden = fields.count("hidden_size")
    for key, size in (("num_key_value_heads", 1), ("conv1d_width", _KERNEL), ("lru_width", hidden)):
        fields.expect(key, size)
    fields.ignore("attention_bias")
    intermediate = fields.count("intermediate_size", least=2) // 2
    _, mlp_modules = blocks.dense_mlp(hidden, intermediate, bias=True, path="mlp_block")
    mlp = DenseMLP(intermediate=intermediate, activation_arrays=1), mlp_modules
    layers = {
        kind: blocks.decoder_layer(
            mixer, mlp, hidden, norms=("temporal_pre_norm", "channel_pre_norm")
        )
        for kind, mixer in (
            ("attention", _attention(fields, hidden)),
            ("recurrent", _recurrent(fields, hidden)),
        )
    }
    # The class always makes a head and drops it at load when the checkpoint has none.
    tied = fields.flag("tie_word_embeddings", True)
    return blocks.decoder(
        fields,
        (layers[kind] for kind in _kinds(fields)),
        blocks.ends(fields, tied=tied, norm_path="model.final_norm"),
        makes_own_cache=True,
    )


def _kinds(fields: Fields) -> list[str]:
    """The cycle of kinds over all layers; the class looks at the cache of the first attention."""
    count = fields.layers()
    # The 2B and 9B models name this list differently.
    key = "block_types" if fields.has("block_types") else "_block_types"
    fields.ignore("block_types", "_block_types")
    cycle = fields.texts(key) or []
    fields.require_kinds(key, cycle[:count], _KINDS, ("attention",))
    return [cycle[index % len(cycle)] for index in range(count)]


def _attention(fields: Fields, hidden: int) -> blocks.MixerBlock:
    """Multi-query attention over a window."""
    spec = blocks.grouped_attention(
        fields.with_overrides({"num_key_value_heads": 1}), blocks.derived_head_dim(fields)
    ).sliding(fields.count("attention_window_size"))
    return spec, under("temporal_block", blocks.attention(hidden, spec, output_bias=True))


def _recurrent(fields: Fields, hidden: int) -> blocks.MixerBlock:
    """A gated linear recurrence as wide as the model, behind a convolution."""
    heads = fields.count("num_attention_heads")
    head_dim = hidden // heads
    spec = Recurrent(
        kind="rg_lru",
        scan=Scan.RG_LRU,
        inner_dim=hidden,
        kernel=_KERNEL,
        state=(StateBuffer((_KERNEL - 1) * hidden, view_elements=hidden), StateBuffer(hidden)),
    )
    modules = (
        linear("linear_y", hidden, hidden, bias=True),
        linear("linear_x", hidden, hidden, bias=True),
        linear("linear_out", hidden, hidden, bias=True),
        convolution("conv_1d", hidden, _KERNEL, bias=True),
        array("rg_lru.recurrent_param", (hidden,)),
        array("rg_lru.input_gate_weight", (heads, head_dim, head_dim)),
        array("rg_lru.input_gate_bias", (heads, head_dim)),
        array("rg_lru.recurrent_gate_weight", (heads, head_dim, head_dim)),
        array("rg_lru.recurrent_gate_bias", (heads, head_dim)),
    )
    return spec, under("temporal_block", modules)


CLASSES = {"recurrent_gemma": Irregular(builder=_build, own_head="lm_head")}
