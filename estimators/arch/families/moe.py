"""Decoders of grouped-query attention over experts, one row of data a model type.

Source: mlx-lm models/mixtral.py, phimoe.py, qwen2_moe.py, qwen3_moe.py, olmoe.py,
granitemoe.py, minimax.py, glm4_moe.py and ernie4_5_moe.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from memfit.estimators.arch.decoder import (
    FeedForwardBlock,
    at_8_bits,
    decoder_layer,
    dense_mlp,
    derived_head_dim,
    ends,
    expert_modules,
    grouped_query,
    mixture,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Modules, Part, array, attention, linear, norm, under
from memfit.estimators.arch.specs import Attention, MixtureOfExperts


class HeadDim(Enum):
    """Where a class takes the width of a head from."""

    DERIVED = auto()
    OPTIONAL = auto()
    REQUIRED = auto()


class QKNorm(Enum):
    """What the norms of queries and keys span."""

    NONE = auto()
    HEAD = auto()
    ALL_HEADS = auto()


def _none(fields: Fields, count: int) -> frozenset[int]:
    return frozenset()


def _first(fields: Fields, count: int) -> frozenset[int]:
    if fields.null("n_routed_experts"):
        return frozenset(range(count))
    return frozenset(range(min(count, fields.count("first_k_dense_replace", least=0))))


def _unless_sparse_step(fields: Fields, count: int) -> frozenset[int]:
    step = fields.count("decoder_sparse_step")
    named = fields.counts("mlp_only_layers", least=0) or []
    if fields.count("num_experts", least=0) == 0:
        return frozenset(range(count))
    return frozenset(named) | {index for index in range(count) if (index + 1) % step}


def _outside_span(fields: Fields, count: int) -> frozenset[int]:
    first = fields.count("moe_layer_start_index", least=0)
    last = fields.optional_count("moe_layer_end_index", least=0)
    step = fields.count("moe_layer_interval")
    span = range(first, count if last is None else last + 1)
    return frozenset(index for index in range(count) if index not in span or (index + 1) % step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one model type differs from the rest.

    ``experts``, ``top_k``, ``width``, the shared ones and a ``bias`` that is a text are config
    keys; ``block``, ``router`` and ``correction`` are module paths. ``bias`` is of queries, keys
    and values, ``output_bias`` says whether the output has it too. ``tied`` says whether the
    class heeds ``tie_word_embeddings``. ``biased_ends`` are LayerNorms and a head with biases.
    ``eight_bit`` are the path endings of the class's ``quant_predicate``. ``defaults`` are the
    class's own, ``unasked`` what it takes whatever the config says; a 0 under a key of
    ``zero_is_absent`` is no size; ``inert`` keys change no byte.
    """

    experts: str
    top_k: str = "num_experts_per_tok"
    width: str = "intermediate_size"
    shared_width: str | None = None
    shared_count: str | None = None
    head_dim: HeadDim = HeadDim.DERIVED
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_key: str | None = None
    kv_optional: bool = False
    bias: bool | str = False
    output_bias: bool = True
    expert_bias: str | None = None
    block: str = "mlp"
    router: str = "gate"
    router_is_linear: bool = True
    correction: str | None = None
    dense: Callable[[Fields, int], frozenset[int]] = _none
    tied: bool = False
    biased_ends: bool = False
    eight_bit: tuple[str, ...] = ()
    defaults: Mapping[str, int | bool] = field(default_factory=dict)
    unasked: Mapping[str, int | bool] = field(default_factory=dict)
    zero_is_absent: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()


_MIXTRAL_SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
}
_MINIMAX = Row(
    experts="num_local_experts",
    head_dim=HeadDim.OPTIONAL,
    qk_norm=QKNorm.ALL_HEADS,
    qk_norm_key="use_qk_norm",
    block="block_sparse_moe",
    correction="e_score_correction_bias",
    tied=True,
    eight_bit=("block_sparse_moe.gate",),
    defaults={"use_qk_norm": True, "tie_word_embeddings": False},
    unasked={"shared_intermediate_size": 0},
)
ROWS = {
    "mixtral": Row(
        experts="num_local_experts",
        kv_optional=True,
        block="block_sparse_moe",
        tied=True,
        defaults={
            **_MIXTRAL_SIZES,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "tie_word_embeddings": False,
        },
    ),
    "phimoe": Row(
        experts="num_local_experts",
        bias=True,
        block="block_sparse_moe",
        biased_ends=True,
        defaults={
            **_MIXTRAL_SIZES,
            "vocab_size": 32064,
            "intermediate_size": 6400,
            "num_local_experts": 16,
        },
        unasked={"attention_bias": True, "lm_head_bias": True},
    ),
    "qwen2_moe": Row(
        experts="num_experts",
        width="moe_intermediate_size",
        shared_width="shared_expert_intermediate_size",
        kv_optional=True,
        bias=True,
        output_bias=False,
        unasked={"decoder_sparse_step": 1},
        inert=("max_window_layers", "use_sliding_window", "layer_types"),
    ),
    "qwen3_moe": Row(
        experts="num_experts",
        width="moe_intermediate_size",
        head_dim=HeadDim.REQUIRED,
        qk_norm=QKNorm.HEAD,
        dense=_unless_sparse_step,
        tied=True,
        eight_bit=("mlp.gate",),
        inert=("max_window_layers", "use_sliding_window"),
    ),
    "olmoe": Row(
        experts="num_experts",
        head_dim=HeadDim.OPTIONAL,
        qk_norm=QKNorm.ALL_HEADS,
        kv_optional=True,
        bias="attention_bias",
        expert_bias="mlp_bias",
        tied=True,
        defaults={"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "granitemoe": Row(
        experts="num_local_experts",
        bias="attention_bias",
        block="block_sparse_moe",
        router="router.layer",
        tied=True,
        # "mlp.down_proj" also ends the path of the experts' switch_mlp.
        eight_bit=("block_sparse_moe.router.layer", "self_attn.o_proj", "mlp.down_proj", "lm_head"),
        defaults={"tie_word_embeddings": True},
    ),
    "minimax": _MINIMAX,
    "minimax_m2": _MINIMAX,
    "glm4_moe": Row(
        experts="n_routed_experts",
        width="moe_intermediate_size",
        shared_count="n_shared_experts",
        head_dim=HeadDim.REQUIRED,
        qk_norm=QKNorm.HEAD,
        qk_norm_key="use_qk_norm",
        bias="attention_bias",
        output_bias=False,
        router_is_linear=False,
        correction="gate.e_score_correction_bias",
        dense=_first,
        inert=("n_group", "topk_group"),
    ),
    "ernie4_5_moe": Row(
        experts="moe_num_experts",
        top_k="moe_k",
        width="moe_intermediate_size",
        shared_count="moe_num_shared_experts",
        head_dim=HeadDim.OPTIONAL,
        bias="use_bias",
        expert_bias="use_bias",
        dense=_outside_span,
        tied=True,
        defaults={
            "moe_k": 1,
            "moe_intermediate_size": 0,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
        },
        zero_is_absent=("moe_intermediate_size", "moe_num_shared_experts"),
        inert=("moe_capacity", "moe_use_aux_free"),
    ),
}


def build(fields: Fields) -> Model:
    """Return the model of a config of one of the rows' types."""
    model_type = fields.text("model_type")
    row = ROWS[model_type]
    fields = fields.revised({}, row.defaults)
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    mixer = _attention(fields, row, hidden)
    mixer_modules = under("self_attn", _attention_modules(fields, row, mixer, hidden))
    count = fields.layers()
    dense_layers = row.dense(fields, count)
    sparse = len(dense_layers & set(range(count))) < count
    bias = row.expert_bias is not None and fields.truth(row.expert_bias)
    dense = dense_mlp(hidden, fields.count("intermediate_size"), bias=bias)
    block = _experts(fields, row, hidden, bias=bias) if sparse else dense
    for key, value in row.unasked.items():
        fields.expect(key, value)
    fields.inert("sliding_window", row.experts, row.top_k, row.width, *row.inert)
    layer, dense_layer = (
        _layer(row, mixer, mixer_modules, feed_forward, hidden) for feed_forward in (block, dense)
    )
    tied = row.tied and fields.truth("tie_word_embeddings")
    outside = ends(hidden, vocabulary, head=not tied, bias=row.biased_ends)
    return Model(
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(dense_layer if i in dense_layers else layer for i in range(count)),
        modules=at_8_bits(outside, row.eight_bit),
    )


def _layer(
    row: Row, mixer: Attention, mixer_modules: Modules, block: FeedForwardBlock, hidden: int
) -> Layer:
    layer = decoder_layer(mixer, mixer_modules, block, hidden, norm_bias=row.biased_ends)
    return replace(layer, modules=at_8_bits(layer.modules, row.eight_bit))


def _attention(fields: Fields, row: Row, hidden: int) -> Attention:
    if row.head_dim is HeadDim.DERIVED or (
        row.head_dim is HeadDim.OPTIONAL and not fields.has("head_dim")
    ):
        head_dim = derived_head_dim(fields, hidden)
    else:
        head_dim = fields.count("head_dim")
    return grouped_query(fields, head_dim, kv_optional=row.kv_optional)


def _attention_modules(fields: Fields, row: Row, spec: Attention, hidden: int) -> Modules:
    bias = row.bias if isinstance(row.bias, bool) else fields.truth(row.bias)
    modules = attention(
        hidden,
        spec.heads,
        spec.kv_heads,
        spec.key_dim,
        bias=bias,
        output_bias=bias and row.output_bias,
    )
    if row.qk_norm is QKNorm.NONE or (row.qk_norm_key and not fields.truth(row.qk_norm_key)):
        return modules
    wide = row.qk_norm is QKNorm.ALL_HEADS
    queries, keys = (spec.heads, spec.kv_heads) if wide else (1, 1)
    return (
        *modules,
        norm("q_norm", queries * spec.key_dim),
        norm("k_norm", keys * spec.key_dim),
    )


def _experts(fields: Fields, row: Row, hidden: int, *, bias: bool) -> FeedForwardBlock:
    width = _size(fields, row, row.width) or fields.count("intermediate_size")
    shared = _size(fields, row, row.shared_width) if row.shared_width else 0
    if row.shared_count and not fields.null(row.shared_count):
        shared = width * _size(fields, row, row.shared_count)
    spec = mixture(fields, row.experts, row.top_k, width=width, shared_width=shared)
    path = "shared_expert" if row.shared_width else "shared_experts"
    modules = expert_modules(spec, hidden, _router(row, spec, hidden), shared=path, bias=bias)
    return spec, under(row.block, modules)


def _size(fields: Fields, row: Row, key: str) -> int:
    return fields.count(key, least=0 if key in row.zero_is_absent else 1)


def _router(row: Row, spec: MixtureOfExperts, hidden: int) -> Modules:
    modules: Modules = (linear(row.router, hidden, spec.experts, Part.ROUTER),)
    if not row.router_is_linear:
        modules = (array(row.router, (spec.experts, hidden), Part.ROUTER),)
    if row.correction:
        modules += (array(row.correction, (spec.experts,), Part.ROUTER, float32=True),)
    if row.shared_width:
        modules += (linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS),)
    return modules
