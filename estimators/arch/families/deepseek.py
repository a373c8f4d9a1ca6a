"""DeepSeek V2, V3 and V3.2, Kimi K2, GLM-5: latent attention over experts; MiniCPM3 without them.

Source: mlx-lm models/deepseek_v2.py, deepseek_v3.py, deepseek_v32.py, glm_moe_dsa.py and
minicpm3.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    Model,
    Modules,
    Part,
    array,
    linear,
    multi_linear,
    norm,
    under,
)
from memfit.estimators.arch.registry import (
    EXPERTS,
    SHARED_EXPERTS,
    ClassRow,
    Cut,
    Cuts,
    Fp8,
    Irregular,
    projections,
)
from memfit.estimators.arch.specs import Indexer, LatentAttention

_SIZES = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 0,
}


class DeepSeek(ClassRow, frozen=True, kw_only=True):
    """A class with latent attention over experts, by how it differs from the others."""

    absorbed: bool = True
    """Whether it keeps the latent, with kv_b_proj split into one matrix per head; otherwise keys
    and values of every head are cached."""
    indexed: bool = False
    """Whether every layer has an indexer."""
    corrected: bool = True
    """Whether routers have a float32 correction of their scores."""

    def describe(self, fields: Fields) -> Model:
        """Return the model of a config."""
        return _describe(fields, self)


def _describe(fields: Fields, traits: DeepSeek) -> Model:
    hidden = fields.count("hidden_size")
    mixer = _latent_attention(fields, fields.count("v_head_dim"), expanded=not traits.absorbed)
    mixer_modules = _latent_modules(fields, mixer, hidden)
    if traits.indexed:
        indexer = _indexer(fields)
        mixer = replace(mixer, indexer=indexer)
        mixer_modules += under("indexer", _indexer_modules(fields, indexer, hidden))
    kinds = _layer_kinds(fields, fields.layers(), indexed=traits.indexed)
    dense = blocks.dense_mlp(hidden, fields.count("intermediate_size"))
    by_kind = {"dense": dense}
    if "sparse" in kinds:
        by_kind["sparse"] = _experts(fields, traits, hidden)
    layers = {
        kind: blocks.decoder_layer((mixer, under("self_attn", mixer_modules)), block, hidden)
        for kind, block in by_kind.items()
    }
    # Widths that follow from others, routing within groups of experts, experts no layer has.
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "n_group", "topk_group")
    fields.ignore("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts")
    fields.ignore("indexer_rope_interleave")
    return blocks.decoder(
        fields,
        (layers[kind] for kind in kinds),
        blocks.ends(fields),
        makes_own_cache=traits.indexed,
        kv_quantizable=not traits.absorbed,
    )


def _latent_attention(fields: Fields, value_dim: int, *, expanded: bool) -> LatentAttention:
    """Return latent attention by DeepSeek's keys."""
    return LatentAttention(
        heads=fields.count("num_attention_heads"),
        latent_dim=fields.count("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim"),
        nope_dim=fields.count("qk_nope_head_dim"),
        value_dim=value_dim,
        low_rank_queries=not fields.null("q_lora_rank"),
        caches_expanded=expanded,
    )


def _latent_modules(fields: Fields, spec: LatentAttention, hidden: int) -> Modules:
    """Parameters of latent attention; a null ``q_lora_rank`` leaves queries uncompressed."""
    bias = not fields.null("attention_bias") and fields.flag("attention_bias", False)
    values = spec.heads * spec.value_dim
    return (
        *_query_modules(fields, spec, hidden, bias=bias),
        linear("kv_a_proj_with_mqa", hidden, spec.latent_dim + spec.rope_dim, bias=bias),
        norm("kv_a_layernorm", spec.latent_dim),
        *_expansion(spec),
        linear("o_proj", values, hidden, bias=bias),
    )


def _query_modules(fields: Fields, spec: LatentAttention, hidden: int, *, bias: bool) -> Modules:
    queries = spec.heads * (spec.nope_dim + spec.rope_dim)
    if not spec.low_rank_queries:
        return (linear("q_proj", hidden, queries),)
    rank = fields.count("q_lora_rank")
    return (
        linear("q_a_proj", hidden, rank, bias=bias),
        norm("q_a_layernorm", rank),
        linear("q_b_proj", rank, queries),
    )


def _expansion(spec: LatentAttention) -> Modules:
    if spec.caches_expanded:
        outputs = spec.heads * (spec.nope_dim + spec.value_dim)
        return (linear("kv_b_proj", spec.latent_dim, outputs),)
    return (
        multi_linear("embed_q", spec.heads, spec.nope_dim, spec.latent_dim),
        multi_linear("unembed_out", spec.heads, spec.latent_dim, spec.value_dim),
    )


def _indexer(fields: Fields) -> Indexer:
    return Indexer(
        heads=fields.count("index_n_heads"),
        dim=fields.count("index_head_dim"),
        top_k=fields.count("index_topk"),
    )


def _indexer_modules(fields: Fields, indexer: Indexer, hidden: int) -> Modules:
    return (
        linear("wq_b", fields.count("q_lora_rank"), indexer.heads * indexer.dim),
        linear("wk", hidden, indexer.dim),
        norm("k_norm", indexer.dim, bias=True),
        linear("weights_proj", hidden, indexer.heads),
    )


def _layer_kinds(fields: Fields, count: int, *, indexed: bool) -> list[str]:
    """``dense`` or ``sparse`` for each layer; lists that newer configs add must say the same."""
    first = fields.count("first_k_dense_replace", least=0)
    step = fields.count("moe_layer_freq")
    experts = not fields.null("n_routed_experts") and fields.has("n_routed_experts")
    kinds = [
        "sparse" if experts and index >= first and index % step == 0 else "dense"
        for index in range(count)
    ]
    fields.expect("mlp_layer_types", kinds)
    if indexed:
        fields.expect("layer_types", ["indexed_attention"] * count)
        fields.expect("indexer_types", ["full"] * count)
    return kinds


def _experts(fields: Fields, traits: DeepSeek, hidden: int) -> blocks.FeedForwardBlock:
    width = fields.count("moe_intermediate_size")
    shared = fields.optional_count("n_shared_experts") or 0
    spec = blocks.mixture(
        fields,
        "n_routed_experts",
        width=width,
        shared_width=width * shared,
        float32_scores=traits.corrected,
    )
    router = blocks.corrected_router(hidden, spec.experts)
    if not traits.corrected:
        router = (array("gate", (spec.experts, hidden), Part.ROUTER),)
    return spec, under("mlp", blocks.expert_modules(spec, hidden, router))


def _build_minicpm3(fields: Fields) -> Model:
    """Return the model of a ``minicpm3`` config; it caches keys and values of every head."""
    hidden = fields.count("hidden_size")
    # Newer configs give the width of the rope under head_dim.
    fields.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "dim_model_base", "scale_depth")
    spec = _latent_attention(
        fields, blocks.derived_head_dim(fields, given="v_head_dim"), expanded=True
    )
    fields.count("q_lora_rank")
    mixer = spec, under("self_attn", _latent_modules(fields, spec, hidden))
    layer = blocks.decoder_layer(
        mixer, blocks.dense_mlp(hidden, fields.count("intermediate_size")), hidden
    )
    tied = fields.flag("tie_word_embeddings", False)
    return blocks.decoder(fields, (layer,) * fields.layers(), blocks.ends(fields, tied=tied))


_CUTS: Cuts = {
    "self_attn.q_proj": Cut.OUTPUTS,
    "self_attn.q_b_proj": Cut.OUTPUTS,
    "self_attn.embed_q": Cut.SLICE,
    "self_attn.unembed_out": Cut.SLICE,
    "self_attn.o_proj": Cut.INPUTS,
    **projections("mlp"),
    **EXPERTS,
    **SHARED_EXPERTS,
}
# Classes that kept keys and values of every head, where newer ones keep a latent: too different to
# describe.
_REWRITTEN = (0, 30, 6), "f18526f8"
_V2 = DeepSeek(
    absorbed=False,
    corrected=False,
    defaults=_SIZES,
    tensor={**_CUTS, "self_attn.kv_b_proj": Cut.OUTPUTS},
    pipeline=True,
)
V3 = DeepSeek(
    defaults={**_SIZES, "num_experts_per_tok": 1},
    # By number, as the class does: layer 61 is the prediction layer of DeepSeek-V3.
    drops=r"^model\.layers\.61|rotary_emb\.inv_freq",
    fp8=Fp8.BLOCKS,
    unpacks_integers=True,
    tensor=_CUTS,
    pipeline=True,
    rewritten=_REWRITTEN,
)
_GLM5 = DeepSeek(
    indexed=True,
    drops_later_layers=True,
    fp8=Fp8.BLOCKS,
    tensor=_CUTS,
    pipeline=True,
    since=(0, 30, 7),
    rewritten=_REWRITTEN,
)
CLASSES: dict[str, ClassRow] = {
    "deepseek_v2": _V2,
    "deepseek_v3": V3,
    "deepseek_v32": replace(
        _GLM5,
        defaults={
            **_SIZES,
            "num_experts_per_tok": 1,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        since=(0, 28, 4),
    ),
    "glm_moe_dsa": _GLM5,
    "joyai_llm_flash": replace(V3, since=(0, 31, 1)),
    "kimi_k2": replace(V3, since=(0, 26, 1)),
    "minicpm3": Irregular(builder=_build_minicpm3),
}
