"""Dense transformers by model type: what each mlx-lm class has that the others have not."""

from msgspec.structs import replace

from memfit.estimators.arch.families import windows
from memfit.estimators.arch.families.dense import (
    ATTENTION_BIAS,
    MLP_BIAS,
    TIED,
    UNTIED,
    Dense,
    HeadDim,
    Key,
    QKNorm,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.registry import DENSE, HEAD, ROPE, ROTARY, ClassRow, Fp8


def _gemma3_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The pattern alone counts, whatever layer_types says."""
    fields.texts("layer_types", layers)
    return windows.by_interval(fields, layers)


_TIED_AS_GIVEN = Key("tie_word_embeddings")

_LLAMA = Dense(
    kv_optional=True,
    head_dim=HeadDim.OPTIONAL,
    input_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    tied=TIED,
    windows=windows.by_layer_types,
    makes_own_cache=True,
    drops=ROTARY,
    drops_when_tied=HEAD,
    tensor=DENSE,
)
# Classes of their own that lay their layers out as llama.py does.
_LIKE_LLAMA = replace(_LLAMA, drops="", drops_when_tied="", tensor=None)
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_OLMO2 = replace(
    _LIKE_LLAMA,
    qk_norm=QKNorm.ALL_HEADS,
    norms=_POST_NORMS,
    norms_after=True,
    windows=None,
    makes_own_cache=False,
)
_QWEN2 = Dense(
    ignored=("attention_bias",), input_bias=True, tied=TIED, drops=ROTARY, drops_when_tied=HEAD
)
_GEMMA = Dense(head_dim=HeadDim.GIVEN, tied=True)
_GLM = Dense(
    head_dim=HeadDim.OPTIONAL,
    input_bias=ATTENTION_BIAS,
    mlp_projections=("gate_up_proj", "down_proj"),
    tied=TIED,
)
GLM4 = replace(
    _GLM,
    head_dim=HeadDim.GIVEN,
    input_bias=Key("attention_bias"),
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
    ),
    tied=False,
)
_COHERE = Dense(
    defaults={
        "hidden_size": 8192,
        "num_hidden_layers": 40,
        "intermediate_size": 22528,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 256000,
    },
    input_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    qk_norm=QKNorm.TABLE,
    qk_norm_on=Key("use_qk_norm", False),
    norms=("input_layernorm",),
    norm_bias=Key("layer_norm_bias", False),
    tied=True,
)

CLASSES: dict[str, ClassRow] = {
    "apertus": Dense(
        qk_norm=QKNorm.HEAD,
        mlp_projections=("up_proj", "down_proj"),
        mlp_scalars=("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "act_fn.eps"),
        mlp_bias=Key("mlp_bias"),
        gated=False,
        norms=("attention_layernorm", "feedforward_layernorm"),
        tied=_TIED_AS_GIVEN,
        drops_when_tied=HEAD,
        since=(0, 27, 1),
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        defaults={
            "hidden_size": 4096,
            "head_dim": 128,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        head_dim=HeadDim.GIVEN,
        heads_match_hidden=True,
        qk_norm=QKNorm.NONE,
        windows=windows.by_interval,
        makes_own_cache=True,
        ignored=("use_parallel_block",),
    ),
    "ernie4_5": Dense(
        head_dim=HeadDim.OPTIONAL,
        input_bias=Key("use_bias"),
        output_bias=Key("use_bias"),
        mlp_bias=Key("use_bias"),
        tied=_TIED_AS_GIVEN,
    ),
    "exaone4": Dense(
        head_dim=HeadDim.GIVEN,
        qk_norm=QKNorm.HEAD,
        norms=_POST_NORMS,
        norms_after=True,
        tied=_TIED_AS_GIVEN,
        windows=windows.by_letters,
        makes_own_cache=True,
        since=(0, 26, 1),
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        ignored=("query_pre_attn_scalar", "sliding_window_size"),
        activation_arrays=1,
        norms=(
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "post_attention_layernorm",
        ),
        fused=False,
        kv_quantizable=False,
    ),
    "gemma3_text": Dense(
        defaults={
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "head_dim": 256,
            "vocab_size": 262144,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        head_dim=HeadDim.GIVEN,
        qk_norm=QKNorm.HEAD,
        activation_arrays=1,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        tied=TIED,
        windows=_gemma3_windows,
        makes_own_cache=True,
        ignored=("query_pre_attn_scalar", "use_bidirectional_attention"),
        own_head="lm_head",
    ),
    "glm": replace(_GLM, drops=ROTARY, drops_when_tied=HEAD, since=(0, 28, 0)),
    "glm4": GLM4,
    "granite": Dense(
        input_bias=Key("attention_bias"),
        output_bias=Key("attention_bias"),
        mlp_bias=Key("mlp_bias"),
        # What writes to the residual stream, and the head.
        eight_bit=("self_attn.o_proj", "mlp.down_proj", "lm_head"),
        tied=TIED,
        drops_when_tied=HEAD,
    ),
    # The class builds the head whether tied or not.
    "helium": Dense(input_bias=Key("attention_bias"), mlp_bias=Key("mlp_bias"), tied=False),
    "hunyuan_v1_dense": Dense(
        ignored=(
            "attention_head_dim",
            "cla_share_factor",
            "dense_list",
            "num_experts",
            "num_shared_expert",
            "org_vocab_size",
        ),
        head_dim=HeadDim.OPTIONAL,
        input_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=QKNorm.HEAD,
        qk_norm_on=Key("use_qk_norm", True),
        qk_norms=("query_layernorm", "key_layernorm"),
        tied=UNTIED,
        drops_when_tied=HEAD,
        since=(0, 26, 3),
    ),
    "internlm3": Dense(
        kv_optional=True,
        input_bias=Key("qkv_bias", False),
        output_bias=Key("qkv_bias", False),
        mlp_bias=Key("bias", False),
        tied=UNTIED,
        drops=ROPE,
    ),
    "iquestcoder": replace(_LLAMA, since=(0, 30, 2)),
    "llama": _LLAMA,
    "mimo": replace(
        _QWEN2,
        tied=UNTIED,
        # Multi-token prediction, which mlx-lm does not run.
        drops=rf"{ROTARY}|^model\.mtp_layers\.",
        drops_when_tied=HEAD,
    ),
    "minicpm": Dense(
        ignored=("sparse_config",),
        tied=UNTIED,
        copies_embedding=True,
    ),
    "ministral3": replace(
        _LLAMA,
        input_bias=False,
        output_bias=False,
        mlp_bias=False,
        drops=ROTARY,
        drops_when_tied=HEAD,
        fp8=Fp8.SCALAR,
        pipeline=True,
        since=(0, 28, 4),
    ),
    "mistral": _LLAMA,
    "nemotron": replace(
        _LIKE_LLAMA,
        kv_optional=False,
        mlp_projections=("up_proj", "down_proj"),
        gated=False,
        norm_bias=True,
        tied=UNTIED,
        windows=None,
        makes_own_cache=False,
    ),
    "olmo2": replace(_OLMO2, drops=ROTARY),
    "olmo3": replace(
        _OLMO2,
        mlp_bias=False,
        tied=UNTIED,
        windows=windows.by_layer_types_every_fourth_full,
        makes_own_cache=True,
        since=(0, 28, 2),
    ),
    "phi3": Dense(
        kv_optional=True,
        ignored=("full_attn_mod",),
        projections=("qkv_proj", "o_proj"),
        mlp_projections=("gate_up_proj", "down_proj"),
        tied=UNTIED,
    ),
    "qwen2": replace(_QWEN2, tensor=DENSE, pipeline=True),
    "qwen3": Dense(
        head_dim=HeadDim.GIVEN,
        qk_norm=QKNorm.HEAD,
        tied=_TIED_AS_GIVEN,
        drops_when_tied=HEAD,
        tensor=DENSE,
    ),
    "seed_oss": Dense(
        head_dim=HeadDim.GIVEN,
        input_bias=ATTENTION_BIAS,
        output_bias=Key("attention_out_bias", False),
        mlp_bias=MLP_BIAS,
        tied=TIED,
        drops_when_tied=HEAD,
        since=(0, 26, 4),
    ),
    # Without make_cache of its own the class masks the window and keeps every token.
    "smollm3": replace(
        _LIKE_LLAMA,
        ignored=("no_rope_layers", "no_rope_layer_interval"),
        rotating=False,
        makes_own_cache=False,
        drops=ROTARY,
        drops_when_tied=HEAD,
    ),
    "stablelm": Dense(
        heads_match_hidden=True,
        input_bias=Key("use_qkv_bias"),
        qk_norm=QKNorm.EACH_HEAD,
        qk_norm_on=Key("qk_layernorm", False),
        qk_norms=("q_layernorm", "k_layernorm"),
        norm_bias=True,
        parallel=Key("use_parallel_residual", False),
        tied=False,
        float32=True,
        kv_quantizable=False,
    ),
    "telechat3": replace(
        _LIKE_LLAMA,
        kv_optional=False,
        tied=UNTIED,
        windows=None,
        makes_own_cache=False,
        since=(0, 30, 5),
    ),
    "xverse": replace(_LLAMA, since=(0, 32, 0)),
}
