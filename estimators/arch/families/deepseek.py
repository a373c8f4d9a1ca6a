"""DeepSeek V2, V3 and V3.2, Kimi K2 and GLM-5: latent attention over experts.

Source: mlx-lm models/deepseek_v2.py, deepseek_v3.py, deepseek_v32.py and glm_moe_dsa.py.
"""

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Modules, Part, array, linear, multi_linear, norm, under
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


class Traits(Struct, frozen=True, kw_only=True):
    """How one class differs from the others."""

    absorbed: bool = True
    """Whether it keeps the latent, with kv_b_proj split into one matrix per head; otherwise keys
    and values of every head are cached."""
    indexed: bool = False
    """Whether every layer has an indexer."""
    corrected: bool = True
    """Whether routers have a float32 correction of their scores."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """The class's own values for absent keys."""


_V3 = Traits(defaults={**_SIZES, "num_experts_per_tok": 1})
MODELS = {
    "deepseek_v2": Traits(absorbed=False, corrected=False, defaults=_SIZES),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "joyai_llm_flash": _V3,
    "deepseek_v32": Traits(
        indexed=True,
        defaults={
            **_SIZES,
            "num_experts_per_tok": 1,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
    ),
    "glm_moe_dsa": Traits(indexed=True),
}


def build(fields: Fields) -> Model:
    """Return the model of a config of one of these types."""
    traits = MODELS[fields.text("model_type")]
    fields = fields.with_overrides({}, traits.defaults)
    hidden = fields.count("hidden_size")
    mixer = latent_attention(fields, fields.count("v_head_dim"), expanded=not traits.absorbed)
    mixer_modules = latent_modules(fields, mixer, hidden)
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


def latent_attention(fields: Fields, value_dim: int, *, expanded: bool) -> LatentAttention:
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


def latent_modules(fields: Fields, spec: LatentAttention, hidden: int) -> Modules:
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


def _experts(fields: Fields, traits: Traits, hidden: int) -> blocks.FeedForwardBlock:
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
