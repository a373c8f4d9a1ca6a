"""Ling and Ring (bailing_moe): fused queries, keys and values over experts.

Source: mlx-lm models/bailing_moe.py.
"""

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, Modules, Part, array, linear, norm, under
from memfit.estimators.arch.registry import HEAD, Irregular
from memfit.estimators.arch.specs import Attention


def _build(fields: Fields) -> Model:
    hidden = fields.count("hidden_size")
    spec = blocks.grouped_attention(
        fields, blocks.derived_head_dim(fields), qk_norm=fields.flag("use_qk_norm", False)
    )
    mixer = spec, under("attention", _attention_modules(fields, spec, hidden))
    count = fields.layers()
    bias = fields.flag("use_bias", False)
    first = min(count, fields.count("first_k_dense_replace", least=0))
    if fields.null("num_experts"):
        first = count
    dense = blocks.dense_mlp(hidden, fields.count("intermediate_size"), bias=bias)
    sparse = _experts(fields, hidden, bias=bias) if first < count else dense
    # A normalised head, routing within groups and windows, which the class has none of.
    fields.ignore("norm_head", "n_group", "topk_group", "sliding_window", "max_window_layers")
    tied = fields.flag("tie_word_embeddings", False)
    return blocks.decoder(
        fields,
        (blocks.decoder_layer(mixer, dense, hidden),) * first
        + (blocks.decoder_layer(mixer, sparse, hidden),) * (count - first),
        blocks.ends(fields, tied=tied, embedding_path="model.word_embeddings"),
    )


def _attention_modules(fields: Fields, spec: Attention, hidden: int) -> Modules:
    fused = (spec.heads + 2 * spec.kv_heads) * spec.key_dim
    qkv_bias, bias = fields.flag("use_qkv_bias", False), fields.flag("use_bias", False)
    modules: Modules = (
        linear("query_key_value", hidden, fused, bias=qkv_bias),
        linear("dense", spec.heads * spec.key_dim, hidden, bias=bias),
    )
    if not spec.qk_norm:
        return modules
    return (*modules, norm("query_layernorm", spec.key_dim), norm("key_layernorm", spec.key_dim))


def _experts(fields: Fields, hidden: int, *, bias: bool) -> blocks.FeedForwardBlock:
    width = fields.count("moe_intermediate_size")
    shared_width = fields.optional_count("moe_shared_expert_intermediate_size", least=0) or width
    shared = fields.count("num_shared_experts", least=0)
    if not fields.flag("moe_router_enable_shared_expert", True):
        shared = 0
    spec = blocks.mixture(fields, "num_experts", width=width, shared_width=shared * shared_width)
    router: Modules = (linear("gate.gate_proj", hidden, spec.experts, Part.ROUTER),)
    if fields.flag("moe_router_enable_expert_bias", False):
        router += (array("gate.expert_bias", (spec.experts,), Part.ROUTER, float32=True),)
    modules = under("mlp", blocks.expert_modules(spec, hidden, router, bias=bias))
    return spec, blocks.at_8_bits(modules, ("mlp.gate.gate_proj",))


CLASSES = {
    "bailing_moe": Irregular(
        builder=_build,
        renames=((r"\.mlp\.gate\.(?=weight$|bias$)", ".mlp.gate.gate_proj."),),
        drops_when_tied=HEAD,
        normalises_head=True,
        since=(0, 26, 4),
    )
}
