"""Hunyuan (A13B, Large): different numbers of experts by layer, keys shared across layers.

Source: mlx-lm models/hunyuan.py.
"""

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, Modules, Part, linear, under
from memfit.estimators.arch.registry import Irregular
from memfit.estimators.arch.specs import Attention, MixtureOfExperts


def _build(fields: Fields) -> Model:
    """Return the model of a ``hunyuan`` config; the class always ties the head."""
    head_dim = blocks.derived_head_dim(fields)
    fields.expect("attention_head_dim", head_dim)
    spec = blocks.grouped_attention(fields, head_dim, qk_norm=fields.required_flag("use_qk_norm"))
    hidden, count = fields.count("hidden_size"), fields.layers()
    feed_forwards = _blocks(fields, hidden, count)
    mixers = ((spec, under("self_attn", m)) for m in _attentions(fields, spec, hidden, count))
    return blocks.decoder(
        fields,
        (blocks.decoder_layer(*parts, hidden) for parts in zip(mixers, feed_forwards, strict=True)),
        blocks.ends(fields, tied=True),
    )


def _attentions(fields: Fields, spec: Attention, hidden: int, count: int) -> list[Modules]:
    bias = fields.required_flag("attention_bias")
    own = blocks.attention(hidden, spec, bias=bias, norms=("query_layernorm", "key_layernorm"))
    every = fields.count("cla_share_factor") if fields.required_flag("use_cla") else 1
    # The layers between attend to the keys of the one before, yet keep a cache of them.
    borrowing = tuple(module for module in own if module.path not in ("k_proj", "v_proj"))
    return [borrowing if index % every else own for index in range(count)]


def _blocks(fields: Fields, hidden: int, count: int) -> list[blocks.FeedForwardBlock]:
    intermediate = fields.count("intermediate_size")
    # Of other runtimes, of a vision tower and of a classifier.
    fields.ignore(
        "dense_list", "org_vocab_size", "anyres_pooling_size", "anyres_vit_max_image_size"
    )
    if fields.count("num_experts") == 1:
        fields.ignore("moe_topk", "moe_intermediate_size", "num_shared_expert", "use_mixed_mlp_moe")
        return [blocks.dense_mlp(hidden, intermediate)] * count
    widths = fields.counts("moe_intermediate_size", count) or [intermediate] * count
    chosen = _one_a_layer(fields, "moe_topk", count)
    shared = [0] * count
    if fields.required_flag("use_mixed_mlp_moe"):
        shared = _one_a_layer(fields, "num_shared_expert", count)
    experts = fields.count("num_experts")
    return [
        _experts(
            fields,
            hidden,
            MixtureOfExperts(
                experts=experts,
                top_k=top_k,
                intermediate=width,
                shared_intermediate=shares * intermediate,
                float32_scores=True,
            ),
        )
        for width, top_k, shares in zip(widths, chosen, shared, strict=True)
    ]


def _one_a_layer(fields: Fields, key: str, count: int) -> list[int]:
    values = fields.counts(key, count)
    if values is None:
        raise fields.fail(key, "missing; the model class needs it")
    return values


def _experts(fields: Fields, hidden: int, spec: MixtureOfExperts) -> blocks.FeedForwardBlock:
    if spec.top_k > spec.experts:
        raise fields.fail("moe_topk", f"{spec.top_k} is more than num_experts {spec.experts}")
    router = (linear("gate.wg", hidden, spec.experts, Part.ROUTER),)
    return spec, under("mlp", blocks.expert_modules(spec, hidden, router, shared="shared_mlp"))


CLASSES = {
    "hunyuan": Irregular(
        builder=_build,
        joined=(
            (".qkv_proj.weight", ("q_proj", "k_proj", "v_proj")),
            # The class zips the two halves with up_proj first.
            (".gate_and_up_proj.weight", ("up_proj", "gate_proj")),
        ),
    )
}
