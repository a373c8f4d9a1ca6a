"""RWKV-7: a matrix state per head, low-rank adapters on decay, values, rate and gate.

Source: mlx-lm models/rwkv7.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch.blocks import decoder, ends
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    Layer,
    Model,
    Module,
    Modules,
    Part,
    array,
    linear,
    norm,
    under,
)
from memfit.estimators.arch.registry import Irregular
from memfit.estimators.arch.specs import DenseMLP, Recurrent, Scan, StateBuffer
from memfit.estimators.base.dtypes import Quantization

# `quant_predicate` asks for 8 bits and leaves the group at MLX's default.
_EIGHT_BITS = Quantization(8, 64)


def _build(fields: Fields) -> Model:
    # The class derives heads from head_dim and always norms with a bias.
    fields.ignore("num_heads", "value_dim", "key_dim", "hidden_ratio", "norm_first")
    hidden, intermediate = fields.count("hidden_size"), fields.count("intermediate_size")
    head_dim = fields.count("head_dim")
    fields.require_multiple("hidden_size", hidden, "head_dim", head_dim)
    # The last token of both mixings, and between them the state.
    token = StateBuffer(hidden, view_elements=hidden)
    mixer = Recurrent(
        kind="rwkv",
        scan=Scan.WKV,
        inner_dim=hidden,
        state=(token, StateBuffer(hidden * head_dim), token),
    )
    first, others = (
        Layer(
            (mixer,),
            DenseMLP(intermediate=intermediate, gated=False, token_shift=True),
            _layer_modules(fields, hidden, intermediate, is_first=is_first),
        )
        for is_first in (True, False)
    )
    embeddings, *others_outside = ends(
        fields,
        tied=fields.flag("tie_word_embeddings", False),
        embedding_path="model.embeddings",
        norm_bias=True,
    )
    return decoder(
        fields,
        (first, *[others] * (fields.layers() - 1)),
        (replace(embeddings, predicate=_EIGHT_BITS), *others_outside),
        makes_own_cache=True,
    )


def _layer_modules(fields: Fields, hidden: int, intermediate: int, *, is_first: bool) -> Modules:
    """The first layer norms the embedding and has no values of an earlier layer to mix in."""
    modules = (
        *under("attn", _time_mixing(fields, hidden, is_first=is_first)),
        linear("ffn.key", hidden, intermediate, Part.MLP),
        linear("ffn.value", intermediate, hidden, Part.MLP),
        array("ffn.x_k", (hidden,), Part.MLP),
        norm("attn_norm", hidden, bias=True),
        norm("ffn_norm", hidden, bias=True),
    )
    return (norm("pre_norm", hidden, bias=True), *modules) if is_first else modules


def _time_mixing(fields: Fields, hidden: int, *, is_first: bool) -> Modules:
    per_head = (hidden // fields.count("head_dim"), fields.count("head_dim"))
    values = fields.count("v_low_rank_dim")
    return (
        *(array(f"x_{name}", (1, 1, hidden)) for name in "rwkvag"),
        *(array(name, per_head) for name in ("k_k", "k_a", "r_k")),
        *(linear(f"{name}_proj", hidden, hidden) for name in "rkv"),
        Module("g_norm", per_head, Part.NORM, bias=hidden),
        *_low_rank("w_lora", hidden, fields.count("decay_low_rank_dim")),
        *(() if is_first else _low_rank("v_lora", hidden, values)),
        *_low_rank("a_lora", hidden, fields.count("a_low_rank_dim")),
        *_low_rank("g_lora", hidden, fields.count("gate_low_rank_dim"), bias=False),
        # The workspace formula takes a mixer's last matrix as the one back to the hidden size.
        linear("o_proj", hidden, hidden),
    )


def _low_rank(path: str, hidden: int, rank: int, *, bias: bool = True) -> Modules:
    """Down and up projections; the second is kept at 8 bits."""
    return (
        linear(f"{path}.lora.0", hidden, rank),
        linear(f"{path}.lora.2", rank, hidden, bias=bias, predicate=_EIGHT_BITS),
    )


CLASSES = {"rwkv7": Irregular(builder=_build, since=(0, 30, 2))}
