"""The operations of the token mixers, as llama.cpp puts them into its graph.

Source: src/llama-graph.cpp (build_attn_mha) and src/models/*.cpp at commit 0c1e57098; order and
sizes are those of graphs that build b11549 made. Where the models of a kind differ in small
operations, one of them stands for all.
"""

from memfit.estimators.arch.mixer_kinds import latent_of
from memfit.estimators.arch.model import Layer
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    Indexer,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.runtimes.llama_cpp.builder import Builder
from memfit.estimators.runtimes.llama_cpp.ggml import Stored, Tensor
from memfit.estimators.runtimes.llama_cpp.recurrences import gated_delta, recurrent

_HALF = 2
# Their queries and keys have no positions (src/models/*.cpp without ggml_rope).
_UNTURNED = (
    *("bloom", "gpt2", "jais", "jamba", "kimi-linear", "kimi_linear", "kimi-k3", "mpt"),
    *("nemotron_h", "nemotron_h_moe", "refact", "starcoder"),
)
# gemma3n.cpp and gemma4.cpp: values have a norm too, and may be those of the keys.
_NORMED_VALUES = ("gemma3n", "gemma4")


def mix(to: Builder, mixer: Mixer, normed: Tensor) -> Tensor:
    match mixer:
        case Attention():
            return to.product("attn_output", _attention(to, mixer, normed), to.hidden)
        case LatentAttention():
            return to.product("attn_output", _latent(to, mixer, normed), to.hidden)
        case GatedDelta():
            return gated_delta(to, mixer, normed)
        case Recurrent():
            return recurrent(to, mixer, normed)
        case TracedMixer():
            raise UnsupportedError("llama.cpp has operations of its own for these layers")
        case _:
            assert_never(mixer)


def _attention(to: Builder, spec: Attention, normed: Tensor) -> Tensor:
    width, keys, values = (
        spec.heads * spec.key_dim,
        spec.kv_heads * spec.key_dim,
        spec.kv_heads * spec.value_dim,
    )
    caches, inputs = to.caches(spec), to.inputs_of(spec)
    turn_keys, turn_values = inputs.rotations
    if to.weights.joins_queries and not spec.output_gate:
        projected = _projected(to, "attn_qkv", normed, width + keys + values)
        key, value = to.view(projected, keys), to.view(projected, values)
    else:
        projected = _projected(to, "attn_q", normed, width * (1 + spec.output_gate))
        key, value = (
            to.view(_projected(to, name, normed, size))
            for name, size in (("attn_k", keys), ("attn_v", values))
        )
    query = _turned(to, "attn_q_norm", to.view(projected, width), width, spec.heads)
    query = to.rotated(query, turn_keys)
    to.graph.expand(query)
    if spec.owns_cache:
        if to.model.model_type.startswith(_NORMED_VALUES):
            value = to.op(values, value if "attn_v.weight" in to.weights.largest else key)
        key = _turned(to, "attn_k_norm", key, keys, spec.kv_heads)
        key = to.rotated(key, turn_keys)
        value = to.rotated(value, turn_values)
        # build_attn expands values before keys, but not where caches have two lengths.
        for tensor in (key, value) if to.slides else (value, key):
            to.graph.expand(tensor)
        for row, place in zip((key, value), inputs.rows, strict=True):
            to.graph.write(to.cache_place, row, place)
    mixed = _attended(to, spec, query, caches, inputs.mask, spec.value_dim)
    to.graph.expand(mixed)
    mixed = to.rotated(mixed, turn_values)
    if spec.output_gate:
        mixed = to.over(to.view(mixed), to.over(to.op(width, to.view(projected, width))))
    return mixed


def _projected(to: Builder, name: str, normed: Tensor, width: int) -> Tensor:
    return to.biased(to.product(name, normed, width), name)


def _turned(to: Builder, norm: str, heads: Tensor, width: int, count: int) -> Tensor:
    """Queries or keys with their norm and positions, of which the first makes a copy."""
    if length := to.weights.numbers(f"{norm}.weight"):
        heads = to.scaled(to.op(width, heads), count if length < width else 1)
    if to.model.model_type in _UNTURNED:
        return heads
    if heads.root is heads:
        return to.over(heads, to.positions)
    return to.op(width, heads, to.positions)


def _attended(
    to: Builder,
    spec: Attention | LatentAttention,
    query: Tensor,
    caches: tuple[Stored, ...],
    mask: Tensor,
    value_dim: int,
) -> Tensor:
    """Attention proper: fused, or with every score in memory."""
    width = spec.heads * value_dim
    if to.flash:
        mixed = to.op(width, query, *caches, mask)
        mixed.scratch = to.scratch(spec, value_dim)
        return mixed
    values: Tensor = caches[-1]
    if latent_of(spec):
        # Its values are a view of the keys, which is transposed into a copy (build_attn_mha).
        values = to.graph.node(_HALF * value_dim * to.room.full * to.room.streams, values)
    scores = to.op(to.room.of(spec.window) * spec.heads, caches[0], query)
    mixed = to.op(width, values, to.over(scores, mask))
    return mixed if latent_of(spec) else to.op(width, mixed)


def _latent(to: Builder, spec: LatentAttention, normed: Tensor) -> Tensor:
    latent, rope, heads = spec.latent_dim, spec.rope_dim, spec.heads
    # Two views of the keys, each of which is copied where the cache is on the other side.
    caches = (*to.caches(spec)[:1], *to.caches(spec)[:1])
    inputs = to.inputs_of(spec)
    indexer, mask, queries = spec.indexer, inputs.mask, normed
    if rank := to.weights.numbers("attn_q_a_norm.weight"):
        queries = to.norm(to.product("attn_q_a", normed, rank))
    picks = _picks(to, indexer, normed, queries) if indexer else None
    projected = to.product(
        "attn_q_b" if rank else "attn_q", queries, heads * (spec.nope_dim + rope)
    )
    absorbed = to.product("attn_k_b", to.view(projected, heads * spec.nope_dim), heads * latent)
    turned = _turned(to, "", to.view(projected, heads * rope), heads * rope, heads)
    query = to.op(heads * (latent + rope), absorbed, turned)
    row = to.product("attn_kv_a_mqa", normed, latent + rope)
    value = to.scaled(to.op(latent, to.view(row, latent)))
    key = to.op(latent + rope, value, _turned(to, "", to.view(row, rope), rope, 1))
    for tensor in (query, value, key):
        to.graph.expand(tensor)
    to.graph.write(to.cache_place, key, inputs.rows[0])
    if indexer and picks:
        mask = _unmasked(to, indexer, picks, mask)
    mixed = _attended(to, spec, query, caches, mask, latent)
    mixed = to.op(heads * spec.value_dim, to.product("attn_v_b", mixed, heads * spec.value_dim))
    to.graph.expand(mixed)
    return mixed


def _picks(to: Builder, spec: Indexer, normed: Tensor, queries: Tensor) -> Tensor:
    """The tokens that an indexer picks (deepseek32.cpp)."""
    size = spec.heads * spec.dim
    query = to.op(size, to.view(to.product("indexer.attn_q_b", queries, size)), to.positions)
    key = to.scaled(to.scaled(to.op(spec.dim, to.product("indexer.attn_k", normed, spec.dim))))
    key = to.op(spec.dim, to.view(key), to.positions)
    rotation = to.indexer_rotation(spec)
    query, key = to.rotated(query, rotation), to.rotated(key, rotation)
    to.graph.write(to.cache_place, key, to.indexer_rows)
    shares = to.op(spec.heads, to.view(to.product("indexer.proj", normed, spec.heads)))
    scores = to.op(to.room.full, to.view(query), shares, to.indexer_mask)
    count = min(spec.top_k, to.room.full)
    return to.op(count, to.op(count, scores))


def _unmasked(to: Builder, spec: Indexer, picks: Tensor, mask: Tensor) -> Tensor:
    """The mask of the tokens that an indexer picks, made where attention reads it (build_attn)."""
    nothing = to.graph.node(mask.nbytes, mask)
    picked = Stored(0, None, (_zeros(to, spec), to.view(picks), nothing))
    return to.over(mask, picked, to.view(nothing))


def _zeros(to: Builder, spec: Indexer) -> Tensor:
    """Zeros for what is picked, whose room each layer has from the start of the graph."""
    zeros = to.graph.leaf(to.nbytes(min(spec.top_k, to.room.full)))
    return to.over(zeros)


def skip(to: Builder, layer: Layer) -> None:
    """Add what a layer that lies as the one before it has from the start of the graph."""
    for mixer in map(latent_of, layer.mixers):
        if mixer and mixer.indexer:
            to.graph.write(None, _zeros(to, mixer.indexer))
