"""MiMo-V2-Flash: sliding and full attention of different shapes, over experts.

Source: mlx-lm models/mimo_v2_flash.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, array, under
from memfit.estimators.arch.registry import Fp8, Irregular


def _build(fields: Fields) -> Model:
    hidden = fields.count("hidden_size")
    sliding, sparse = _switches(fields, "hybrid_layer_pattern"), _switches(fields, "moe_layer_freq")
    if set(sliding) != {0, 1}:
        problem = "expected both 0 (full) and 1 (sliding); mlx-lm looks for a layer of each"
        raise fields.fail("hybrid_layer_pattern", problem)
    mixers = {kind: _mixer(fields, hidden, sliding=bool(kind)) for kind in (0, 1)}
    by_kind = {0: blocks.dense_mlp(hidden, fields.count("intermediate_size"))}
    if 1 in sparse:
        by_kind[1] = _experts(fields, hidden)
    # sliding_window_size is the one the class reads; routing is within groups of experts.
    fields.ignore("sliding_window", "attention_chunk_size", "n_group", "topk_group")
    return blocks.decoder(
        fields,
        (
            blocks.decoder_layer(mixers[kind], by_kind[experts], hidden)
            for kind, experts in zip(sliding, sparse, strict=True)
        ),
        blocks.ends(fields),
        makes_own_cache=True,
        kv_quantizable=False,
    )


def _switches(fields: Fields, key: str) -> list[int]:
    count = fields.layers()
    values = fields.counts(key, count, least=0)
    if values is None:
        raise fields.fail(key, "missing; the model class needs one entry per layer")
    return [int(value == 1) for value in values]


def _mixer(fields: Fields, hidden: int, *, sliding: bool) -> blocks.MixerBlock:
    swa, sink_key = ("swa_", "swa") if sliding else ("", "full")
    spec = blocks.grouped_attention(
        fields,
        fields.count(f"{swa}head_dim"),
        heads_key=f"{swa}num_attention_heads",
        kv_heads_key=f"{swa}num_key_value_heads",
    )
    spec = replace(
        spec,
        value_dim=fields.count(f"{swa}v_head_dim"),
        sinks=fields.required_flag(f"add_{sink_key}_attention_sink_bias"),
    )
    if sliding:
        spec = spec.sliding(fields.count("sliding_window_size"))
    modules = blocks.attention(hidden, spec)
    if spec.sinks:
        modules += (array("attention_sink_bias", (spec.heads,)),)
    return spec, under("self_attn", modules)


def _experts(fields: Fields, hidden: int) -> blocks.FeedForwardBlock:
    width = fields.count("moe_intermediate_size")
    shared = fields.optional_count("n_shared_experts") or 0
    spec = blocks.mixture(
        fields, "n_routed_experts", width=width, shared_width=width * shared, float32_scores=True
    )
    router = blocks.corrected_router(hidden, spec.experts)
    return spec, under("mlp", blocks.expert_modules(spec, hidden, router))


CLASSES = {
    "mimo_v2_flash": Irregular(
        builder=_build,
        drops=r"^model\.mtp",
        fp8=Fp8.PADDED_BLOCKS,
        since=(0, 30, 0),
    )
}
