"""RecurrentGemma (Griffin): RG-LRU blocks with a local attention now and then.

Source: mlx-lm models/recurrent_gemma.py.
"""

from memfit.estimators.arch.caches import Growth, StateBuffer
from memfit.estimators.arch.families.hybrid import (
    MixerBlock,
    derived_head_dim,
    outside,
    require_kinds,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import (
    Modules,
    array,
    attention,
    convolution,
    gated_mlp,
    linear,
    norm,
    under,
)
from memfit.estimators.arch.specs import Attention, DenseMLP, Recurrent, Scan

_KINDS = ("attention", "recurrent")
_KERNEL = 4  # the class reads no key for it


def build(fields: Fields) -> Model:
    """Return the model of a ``recurrent_gemma`` config."""
    hidden = fields.count("hidden_size")
    for key, size in (("num_key_value_heads", 1), ("conv1d_width", _KERNEL), ("lru_width", hidden)):
        fields.expect(key, size)
    fields.inert("attention_bias")
    intermediate = fields.count("intermediate_size", least=2) // 2
    mlp = gated_mlp(hidden, intermediate, bias=True)
    mixers = {"attention": _attention(fields, hidden), "recurrent": _recurrent(fields, hidden)}
    rest: Modules = (
        *under("mlp_block", mlp),
        norm("temporal_pre_norm", hidden),
        norm("channel_pre_norm", hidden),
    )
    layers = {
        kind: Layer(
            (mixer,),
            DenseMLP(intermediate=intermediate),
            under("temporal_block", modules) + rest,
        )
        for kind, (mixer, modules) in mixers.items()
    }
    # The class always makes a head and drops it at load when the checkpoint has none.
    tied = fields.flag("tie_word_embeddings", True)
    return Model(
        model_type="recurrent_gemma",
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        layers=tuple(layers[kind] for kind in _kinds(fields)),
        modules=outside(fields, tied=tied, norm_path="model.final_norm"),
        makes_own_cache=True,
    )


def _kinds(fields: Fields) -> list[str]:
    """The cycle of kinds over all layers; the class looks at the cache of the first attention."""
    count = fields.layers()
    # The 2B and 9B models name this list differently.
    key = "block_types" if fields.has("block_types") else "_block_types"
    fields.inert("block_types", "_block_types")
    cycle = fields.texts(key) or []
    require_kinds(fields, key, cycle[:count], _KINDS, ("attention",))
    return [cycle[index % len(cycle)] for index in range(count)]


def _attention(fields: Fields, hidden: int) -> MixerBlock:
    """Multi-query attention over a window."""
    head_dim = derived_head_dim(fields)
    spec = Attention(
        heads=hidden // head_dim,
        kv_heads=1,
        key_dim=head_dim,
        value_dim=head_dim,
        window=fields.count("attention_window_size"),
        growth=Growth.ROTATING,
    )
    return spec, attention(hidden, spec.heads, 1, head_dim, output_bias=True)


def _recurrent(fields: Fields, hidden: int) -> MixerBlock:
    """A gated linear recurrence as wide as the model, behind a convolution."""
    heads = fields.count("num_attention_heads")
    head_dim = hidden // heads
    spec = Recurrent(
        kind="rg_lru",
        scan=Scan.KERNEL,
        inner_dim=hidden,
        state=(StateBuffer((_KERNEL - 1) * hidden, view_elements=hidden), StateBuffer(hidden)),
    )
    return spec, (
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
