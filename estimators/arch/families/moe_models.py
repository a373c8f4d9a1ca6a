"""Decoders with experts by model type: what each mlx-lm class has that the others have not.

Source: mlx-lm models/mixtral.py, phimoe.py, qwen2_moe.py, qwen3_moe.py, olmoe.py,
granitemoe.py, minimax.py, glm4_moe.py, solar_open.py and ernie4_5_moe.py.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.families.dense_traits import HeadDim, QKNorm
from memfit.estimators.arch.fields import Fields


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


class MoE(Struct, frozen=True, kw_only=True):
    """The traits of one model class; every path and every key as that class has it."""

    experts: str
    """The key of their number."""
    top_k: str = "num_experts_per_tok"
    width: str = "intermediate_size"
    """The key of the width of one expert."""
    shared_width: str | None = None
    """The key of the width of the shared expert."""
    shared_count: str | None = None
    """The key of how many shared experts there are, each as wide as a routed one."""
    head_dim: HeadDim = HeadDim.DERIVED
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_key: str | None = None
    """The key that turns the norm on."""
    kv_optional: bool = False
    """Whether absent KV heads are as many as heads."""
    bias: bool | str = False
    """Of queries, keys and values: whether there is one, or the key that says it."""
    output_bias: bool = True
    """Whether the output has it too."""
    expert_bias: str | None = None
    """The key of a bias in MLPs and experts."""
    block: str = "mlp"
    router: str = "gate"
    router_is_linear: bool = True
    correction: str | None = None
    """The path of the router's correction of its scores."""
    float32_scores: bool = False
    """As `MixtureOfExperts.float32_scores`."""
    float32_router: bool = False
    """As `MixtureOfExperts.float32_router`."""
    dense: Callable[[Fields, int], frozenset[int]] = _none
    """Which layers are dense."""
    tied: bool = False
    """Whether the class reads ``tie_word_embeddings``."""
    biased_ends: bool = False
    """Whether norms are LayerNorms and they and the head have biases."""
    eight_bit: tuple[str, ...] = ()
    """Path endings of the class's ``quant_predicate``."""
    defaults: Mapping[str, int | bool] = field(default_factory=dict)
    """The class's own values for absent keys."""
    forced_values: Mapping[str, int | bool] = field(default_factory=dict)
    """What it takes for any value in the config."""
    zero_is_absent: tuple[str, ...] = ()
    """Keys where a 0 is no size."""
    ignored: tuple[str, ...] = ()
    """Keys that change no byte."""


_MIXTRAL_SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
}
_MINIMAX = MoE(
    experts="num_local_experts",
    head_dim=HeadDim.OPTIONAL,
    qk_norm=QKNorm.ALL_HEADS,
    qk_norm_key="use_qk_norm",
    block="block_sparse_moe",
    correction="e_score_correction_bias",
    float32_router=True,
    tied=True,
    eight_bit=("block_sparse_moe.gate",),
    defaults={"use_qk_norm": True, "tie_word_embeddings": False},
    forced_values={"shared_intermediate_size": 0},
)
_GLM4_MOE = MoE(
    experts="n_routed_experts",
    width="moe_intermediate_size",
    shared_count="n_shared_experts",
    head_dim=HeadDim.GIVEN,
    qk_norm=QKNorm.HEAD,
    qk_norm_key="use_qk_norm",
    bias="attention_bias",
    output_bias=False,
    router_is_linear=False,
    correction="gate.e_score_correction_bias",
    float32_scores=True,
    dense=_first,
    ignored=("n_group", "topk_group"),
)
MODELS = {
    "mixtral": MoE(
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
    "phimoe": MoE(
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
        forced_values={"attention_bias": True, "lm_head_bias": True},
    ),
    "qwen2_moe": MoE(
        experts="num_experts",
        width="moe_intermediate_size",
        shared_width="shared_expert_intermediate_size",
        kv_optional=True,
        bias=True,
        output_bias=False,
        forced_values={"decoder_sparse_step": 1},
        ignored=("max_window_layers", "use_sliding_window", "layer_types"),
    ),
    "qwen3_moe": MoE(
        experts="num_experts",
        width="moe_intermediate_size",
        head_dim=HeadDim.GIVEN,
        qk_norm=QKNorm.HEAD,
        dense=_unless_sparse_step,
        tied=True,
        eight_bit=("mlp.gate",),
        ignored=("max_window_layers", "use_sliding_window"),
    ),
    "olmoe": MoE(
        experts="num_experts",
        head_dim=HeadDim.OPTIONAL,
        qk_norm=QKNorm.ALL_HEADS,
        kv_optional=True,
        bias="attention_bias",
        expert_bias="mlp_bias",
        tied=True,
        defaults={"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "granitemoe": MoE(
        experts="num_local_experts",
        bias="attention_bias",
        block="block_sparse_moe",
        router="router.layer",
        float32_scores=True,
        tied=True,
        # "mlp.down_proj" also ends the path of the experts' switch_mlp.
        eight_bit=("block_sparse_moe.router.layer", "self_attn.o_proj", "mlp.down_proj", "lm_head"),
        defaults={"tie_word_embeddings": True},
    ),
    "minimax": _MINIMAX,
    "minimax_m2": _MINIMAX,
    "glm4_moe": _GLM4_MOE,
    # The class is glm4_moe's, with defaults of its own.
    "solar_open": replace(_GLM4_MOE, defaults={"attention_bias": False, "use_qk_norm": False}),
    "ernie4_5_moe": MoE(
        experts="moe_num_experts",
        top_k="moe_k",
        width="moe_intermediate_size",
        shared_count="moe_num_shared_experts",
        head_dim=HeadDim.OPTIONAL,
        bias="use_bias",
        expert_bias="use_bias",
        float32_scores=True,
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
        ignored=("moe_capacity", "moe_use_aux_free"),
    ),
}
