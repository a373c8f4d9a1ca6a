"""The operations of the token mixers, as llama.cpp puts them into its graph.

Source: src/llama-graph.cpp (build_attn_mha) and src/models/*.cpp at commit 0c1e57098; order and
sizes are those of graphs that build b11549 made. Where the models of a kind differ in small
operations, one of them stands for all.
"""

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

_HALF = 2
_MAMBA_KERNEL = 4
_RWKV_MIXTURES = 6


def mix(to: Builder, mixer: Mixer, normed: Tensor) -> Tensor:
    match mixer:
        case Attention():
            mixed = _attention(to, mixer, normed)
        case LatentAttention():
            mixed = _latent(to, mixer, normed)
        case GatedDelta():
            mixed = _gated_delta(to, mixer, normed)
        case Recurrent():
            mixed = _recurrent(to, mixer, normed)
        case TracedMixer():
            raise UnsupportedError("llama.cpp has operations of its own for these layers")
        case _:
            assert_never(mixer)
    return to.product("attn_output", mixed, to.hidden)


def _attention(to: Builder, spec: Attention, normed: Tensor) -> Tensor:
    width = spec.heads * spec.key_dim
    projected = to.product("attn_q", normed, width * (1 + spec.output_gate))
    query = to.op(width, projected) if spec.output_gate else to.over(projected)
    query = to.over(query, to.positions)
    caches, inputs = to.caches(spec), to.inputs_of(spec)
    if spec.owns_cache:
        value = to.product("attn_v", normed, spec.kv_heads * spec.value_dim)
        key = to.over(to.product("attn_k", normed, spec.kv_heads * spec.key_dim), to.positions)
        for row, place in zip((key, value), inputs.rows, strict=True):
            to.graph.write(to.place, row, place)
    mixed = _attended(to, spec, query, caches, inputs.mask, spec.value_dim)
    if spec.output_gate:
        mixed = to.over(mixed, to.over(to.op(width, projected)))
    return mixed


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
    if len(caches) == 1:
        # Its values are a view of the keys, which is transposed into a copy (build_attn_mha).
        values = to.graph.node(_HALF * value_dim * to.room.full * to.room.streams, caches[0])
    scores = to.op(to.room.of(spec.window) * spec.heads, caches[0], query)
    return to.op(width, to.op(width, values, to.over(scores, mask)))


def _latent(to: Builder, spec: LatentAttention, normed: Tensor) -> Tensor:
    latent, rope, heads = spec.latent_dim, spec.rope_dim, spec.heads
    caches, inputs = to.caches(spec)[:1], to.inputs_of(spec)
    indexer, mask = spec.indexer, inputs.mask
    # Four tensors of the picks as one: zeros before and after they are filled, picks and a copy.
    picks = to.op(4 * min(indexer.top_k, to.room.full), normed) if indexer else None
    query = to.product("attn_q_b", normed, heads * (spec.nope_dim + rope))
    absorbed = to.product("attn_k_b", query, heads * latent)
    query = to.op(heads * (latent + rope), absorbed, to.op(heads * rope, query, to.positions))
    row = to.product("attn_kv_a_mqa", normed, latent + rope)
    row = to.op(latent + rope, to.over(to.op(latent, row)), to.op(rope, row, to.positions))
    to.graph.write(to.place, row, inputs.rows[0])
    if indexer and picks:
        mask = _picked(to, indexer, normed, picks, mask)
    mixed = _attended(to, spec, query, caches, mask, latent)
    return to.op(heads * spec.value_dim, to.product("attn_v_b", mixed, heads * spec.value_dim))


def _picked(to: Builder, indexer: Indexer, normed: Tensor, picks: Tensor, mask: Tensor) -> Tensor:
    """The mask of the tokens that an indexer picks, made after the query (build_attn)."""
    query = to.product("indexer.attn_q_b", normed, indexer.heads * indexer.dim)
    scores = to.op(to.room.full, to.over(query, to.positions), to.indexer_mask)
    to.graph.write(None, scores, picks)
    return to.graph.node(mask.nbytes, to.graph.node(mask.nbytes, mask), mask, picks)


def _gated_delta(to: Builder, spec: GatedDelta, normed: Tensor) -> Tensor:
    """Source: qwen35.cpp; the fused operation."""
    inner, keys = spec.value_heads * spec.value_dim, spec.key_heads * spec.key_dim
    state = spec.states()[-1].elements
    mixed = to.product("attn_qkv", normed, spec.conv_dim)
    mixed = to.over(to.convolved(mixed, spec.conv_dim, spec.kernel))
    query, key = (to.over(to.op(keys, mixed)) for _ in range(2))
    scanned = to.scan(inner, state, query, key, mixed, gathers=True)
    out = to.over(to.op(inner, scanned))
    return to.over(out, to.over(to.product("attn_gate", normed, inner)))


def _recurrent(to: Builder, spec: Recurrent, normed: Tensor) -> Tensor:
    if spec.kind == "rwkv":
        return _rwkv(to, spec, normed)
    if spec.kind == "short_convolution":
        mixed = to.product("shortconv.in_proj", normed, 3 * to.hidden)
        kernel = sum(state.elements for state in spec.state) // to.hidden + 1
        window = to.convolved(to.op(to.hidden, mixed), to.hidden, kernel)
        return to.op(to.hidden, mixed, window)
    return _mamba(to, spec, normed)


def _mamba(to: Builder, spec: Recurrent, normed: Tensor) -> Tensor:
    """Source: mamba-base.cpp; other recurrences (minimax-01.cpp) are taken as one."""
    inner, kept = spec.inner_dim, sum(state.elements for state in spec.state[-1:])
    shifted = spec.state[0].elements if len(spec.state) > 1 else 0
    channels = max(inner, shifted // (_MAMBA_KERNEL - 1))
    mixed = to.product("ssm_in", normed, inner + channels)
    convolved = to.over(to.convolved(mixed, channels, _MAMBA_KERNEL))
    # The first generation has a step for every channel, the second for every head.
    steps = [to.over(to.product("ssm_dt", convolved, inner))] if channels == inner else []
    scanned = to.scan(inner, kept, convolved, *steps)
    scanned.place = to.place  # it has a weight, and too few rows to be taken over
    gate = to.op(inner, mixed)
    skipped = to.over(to.op(inner, convolved), scanned)
    return to.over(to.op(inner, gate, skipped))


def _rwkv(to: Builder, spec: Recurrent, normed: Tensor) -> Tensor:
    """Source: rwkv7-base.cpp; mixtures of a token and the one before, and a row of each."""
    hidden = to.hidden
    difference = to.over(to.op(hidden, normed), normed)
    mixtures = to.over(to.op(_RWKV_MIXTURES * hidden, difference), normed)
    rows = [to.op(hidden, mixtures) for _ in range(_RWKV_MIXTURES)]
    scanned = to.scan(hidden, spec.state[-1].elements, *rows, gathers=True)
    scanned.place = to.place
    return to.op(hidden, scanned)
