"""Decoders with experts by model type: what each mlx-lm class has that the others have not."""

from msgspec.structs import replace

from memfit.estimators.arch.families.dense import (
    ATTENTION_BIAS,
    MLP_BIAS,
    TIED,
    UNTIED,
    HeadDim,
    Key,
    QKNorm,
)
from memfit.estimators.arch.families.moe import MoE
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.registry import (
    DENSE,
    EXPERTS,
    HEAD,
    HEADS,
    INPUT_OUTPUT,
    SHARED_EXPERTS,
    W_NAMES,
    ClassRow,
    Cut,
    Fp8,
    projections,
)


def _first(fields: Fields, count: int) -> frozenset[int]:
    if fields.null("n_routed_experts"):
        return frozenset(range(count))
    return frozenset(range(min(count, fields.count("first_k_dense_replace", least=0))))


def _first_before_experts(fields: Fields, count: int) -> frozenset[int]:
    """As `_first`, of a class that cannot do without experts and shared ones."""
    dense = min(count, fields.count("first_k_dense_replace", least=0))
    if dense < count:
        fields.count("n_routed_experts")
        fields.count("n_shared_experts")
    return frozenset(range(dense))


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
    qk_norm_on=Key("use_qk_norm", True),
    block="block_sparse_moe",
    correction="e_score_correction_bias",
    float32_router=True,
    tied=UNTIED,
    eight_bit=("block_sparse_moe.gate",),
    forced_values={"shared_intermediate_size": 0},
    expert_names=W_NAMES,
    fp8=Fp8.BLOCKS,
    tensor={
        **HEADS,
        **projections("block_sparse_moe.switch_mlp"),
        "self_attn.q_norm": Cut.FIRST,
        "self_attn.k_norm": Cut.FIRST,
    },
    since=(0, 28, 4),
)
GLM4_MOE = MoE(
    experts="n_routed_experts",
    expert_width="moe_intermediate_size",
    shared_count="n_shared_experts",
    head_dim=HeadDim.GIVEN,
    qk_norm=QKNorm.HEAD,
    qk_norm_on=Key("use_qk_norm"),
    input_bias=Key("attention_bias"),
    router_is_linear=False,
    correction="gate.e_score_correction_bias",
    float32_scores=True,
    dense=_first,
    ignored=("n_group", "topk_group"),
    # A prefix without an end, as in the class: startswith finds 460 where the layer is 46.
    drops_next_layer=r"^model\.layers\.",
    tensor={**DENSE, **EXPERTS, **SHARED_EXPERTS},
    pipeline=True,
    since=(0, 26, 2),
)
CLASSES: dict[str, ClassRow] = {
    "dots1": MoE(
        experts="n_routed_experts",
        expert_width="moe_intermediate_size",
        shared_count="n_shared_experts",
        head_dim=HeadDim.OPTIONAL,
        qk_norm=QKNorm.HEAD,
        mlp_bias=MLP_BIAS,
        routed_bias=False,
        stack="experts",
        router_is_linear=False,
        correction="gate.e_score_correction_bias",
        float32_correction=False,
        float32_scores=True,
        dense=_first_before_experts,
        tied=UNTIED,
        forced_values={"attention_bias": False, "moe_layer_freq": 1},
        ignored=("n_group", "topk_group", "layer_types", "max_window_layers", "use_sliding_window"),
        drops=r"rotary_emb\.inv_freq",
        drops_when_tied=HEAD,
    ),
    "mixtral": MoE(
        experts="num_local_experts",
        kv_optional=True,
        block="block_sparse_moe",
        tied=UNTIED,
        defaults={
            **_MIXTRAL_SIZES,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_local_experts": 8,
        },
        expert_names=W_NAMES,
        drops_when_tied=HEAD,
    ),
    "phimoe": MoE(
        experts="num_local_experts",
        input_bias=True,
        output_bias=True,
        block="block_sparse_moe",
        norm_bias=True,
        head_bias=True,
        defaults={
            **_MIXTRAL_SIZES,
            "vocab_size": 32064,
            "intermediate_size": 6400,
            "num_local_experts": 16,
        },
        forced_values={"attention_bias": True, "lm_head_bias": True},
        expert_names=W_NAMES,
    ),
    "qwen2_moe": MoE(
        experts="num_experts",
        expert_width="moe_intermediate_size",
        shared_width="shared_expert_intermediate_size",
        kv_optional=True,
        input_bias=True,
        forced_values={"decoder_sparse_step": 1},
        ignored=("max_window_layers", "use_sliding_window", "layer_types"),
    ),
    "qwen3_moe": MoE(
        experts="num_experts",
        expert_width="moe_intermediate_size",
        head_dim=HeadDim.GIVEN,
        qk_norm=QKNorm.HEAD,
        dense=_unless_sparse_step,
        tied=Key("tie_word_embeddings"),
        eight_bit=("mlp.gate",),
        ignored=("max_window_layers", "use_sliding_window"),
        drops_when_tied=HEAD,
        tensor={**DENSE, **EXPERTS},
        pipeline=True,
    ),
    "olmoe": MoE(
        experts="num_experts",
        head_dim=HeadDim.OPTIONAL,
        qk_norm=QKNorm.ALL_HEADS,
        kv_optional=True,
        input_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        mlp_bias=MLP_BIAS,
        tied=TIED,
    ),
    "granitemoe": MoE(
        experts="num_local_experts",
        input_bias=Key("attention_bias"),
        output_bias=Key("attention_bias"),
        block="block_sparse_moe",
        router="router.layer",
        float32_scores=True,
        tied=TIED,
        # "mlp.down_proj" also ends the path of the experts' switch_mlp.
        eight_bit=("block_sparse_moe.router.layer", "self_attn.o_proj", "mlp.down_proj", "lm_head"),
        expert_names={},
        joined=INPUT_OUTPUT,
        drops_when_tied=HEAD,
        since=(0, 27, 1),
    ),
    "minimax": _MINIMAX,
    "minimax_m2": replace(_MINIMAX, since=(0, 30, 2)),
    "glm4_moe": GLM4_MOE,
    # The class is glm4_moe's, with defaults of its own.
    "solar_open": replace(
        GLM4_MOE,
        input_bias=ATTENTION_BIAS,
        qk_norm_on=Key("use_qk_norm", False),
        since=(0, 30, 2),
    ),
    "ernie4_5_moe": MoE(
        experts="moe_num_experts",
        top_k="moe_k",
        expert_width="moe_intermediate_size",
        shared_count="moe_num_shared_experts",
        head_dim=HeadDim.OPTIONAL,
        input_bias=Key("use_bias"),
        output_bias=Key("use_bias"),
        mlp_bias=Key("use_bias"),
        float32_scores=True,
        dense=_outside_span,
        tied=Key("tie_word_embeddings"),
        defaults={
            "moe_k": 1,
            "moe_intermediate_size": 0,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
        },
        zero_is_absent=("moe_intermediate_size", "moe_num_shared_experts"),
        ignored=("moe_capacity", "moe_use_aux_free"),
        # Multi-token prediction, which mlx-lm does not run.
        drops=r"mtp_block\.|mtp_linear_proj\.|mtp_hidden_norm\.|mtp_emb_norm\."
        r"|e_score_correction_bias",
    ),
}
