"""The operations of recurrent layers, as llama.cpp puts them into its graph.

Source: src/models/mamba-base.cpp, delta-net-base.cpp, qwen35.cpp, qwen3next.cpp, kimi-linear.cpp,
minimax-01.cpp and lfm2.cpp of build b11549.
"""

from memfit.estimators.arch.specs import GatedDelta, Recurrent
from memfit.estimators.runtimes.llama_cpp.builder import FLOAT, Builder
from memfit.estimators.runtimes.llama_cpp.ggml import Tensor, View

_MAMBA_KERNEL = 4
_MAMBA_RANK = 16  # the width of a model over that of Mamba's steps, as in all that were published


def gated_delta(to: Builder, spec: GatedDelta, normed: Tensor) -> Tensor:
    """Add gated delta nets: of Qwen3-Next and 3.5, or with a decay of every channel (KDA)."""
    to.graph.expand(normed)
    if to.weights.numbers("ssm_o_norm.weight") or to.model.model_type.startswith("kimi"):
        return _kda(to, spec, normed)
    inner, keys, heads = (
        spec.value_heads * spec.value_dim,
        spec.key_heads * spec.key_dim,
        spec.value_heads,
    )
    kept = to.gathered(spec.states()[0].elements)
    projected = to.product("attn_qkv", normed, spec.conv_dim)
    mixed = to.convolved(kept, to.view(projected), spec.conv_dim)
    states = to.gathered(spec.states()[-1].elements)
    query, key = (_repeated(to, spec, to.over(to.op(keys, to.view(mixed, keys)))) for _ in range(2))
    decay = to.op(heads, to.view(to.product("ssm_alpha", normed, heads)), to.vector(heads))
    decay = to.scaled(to.over(to.placed(decay, to.place)))
    share = to.op(heads, to.view(to.product("ssm_beta", normed, heads)))
    value = to.view(mixed, inner)
    scanned = _delta(to, inner, query, key, value, to.view(decay), share, states)
    out = to.scaled(to.op(inner, scanned), heads)
    gate = to.op(inner, to.view(to.product("attn_gate", normed, inner)))
    return to.view(to.product("ssm_out", to.view(to.over(out, gate)), to.hidden))


def _repeated(to: Builder, spec: GatedDelta, heads: Tensor) -> Tensor:
    """Queries or keys of each value head; Qwen3.5's operation needs no copies."""
    if spec.key_heads == spec.value_heads or to.model.model_type != "qwen3next":
        return heads
    return to.view(to.op(spec.value_heads * spec.key_dim, to.view(heads)))


def _delta(to: Builder, width: int, *sources: Tensor) -> Tensor:
    """The recurrence, whose last source is the states; it returns its output and the new states."""
    *inputs, states = sources
    nbytes = to.nbytes(width) + states.nbytes
    result = to.graph.node(nbytes, *inputs, to.view(states))
    to.graph.write(to.cache_place, View(result, states.nbytes))
    return to.view(result, width)


def _kda(to: Builder, spec: GatedDelta, normed: Tensor) -> Tensor:
    inner, heads = spec.value_heads * spec.value_dim, spec.value_heads
    kept = to.gathered(spec.states()[0].elements)
    parts = []
    for name in "qkv":
        product = to.product(f"attn_{name}", normed, inner)
        window = to.graph.node(to.nbytes(inner) + kept.nbytes // 3, to.view(kept), to.view(product))
        to.graph.write(to.cache_place, window)
        parts.append(to.view(to.op(inner, to.view(to.op(inner, window)))))
    decay = to.product("ssm_f_b", to.product("ssm_f_a", normed, spec.value_dim), inner)
    decay = to.view(to.over(to.scaled(decay)))
    decay = to.view(to.placed(to.op(inner, decay, to.vector(heads)), to.place))
    share = to.op(heads, to.view(to.product("ssm_beta", normed, heads)))
    states = to.gathered(spec.states()[-1].elements)
    query, key = (to.over(to.op(inner, part)) for part in parts[:2])
    scanned = to.op(inner, _delta(to, inner, query, key, parts[2], decay, share, states))
    out = to.scaled(to.op(inner, to.view(scanned)), heads)
    gate = to.product("ssm_g_b", to.product("ssm_g_a", to.view(normed), spec.value_dim), inner)
    out = to.over(out, to.op(inner, to.view(gate)))
    return to.product("attn_output", to.op(inner, out), to.hidden)


def recurrent(to: Builder, spec: Recurrent, normed: Tensor) -> Tensor:
    """Add another recurrence: a short convolution, lightning attention or Mamba."""
    if spec.kind == "linear_attention":
        return _lightning(to, spec, normed)
    if spec.kind == "short_convolution":
        kept = to.gathered(sum(state.elements for state in spec.state))
        projected = to.product("shortconv.in_proj", to.view(normed), 3 * to.hidden)
        parts = [to.view(projected, to.hidden) for _ in range(3)]
        mixed = to.op(to.hidden, *parts[:2])
        window = to.graph.node(mixed.nbytes + kept.nbytes, to.view(kept), to.view(mixed))
        to.graph.write(to.cache_place, window)
        mixed = to.placed(to.op(to.hidden, window, to.vector(3 * to.hidden)), to.place)
        mixed = to.over(parts[2], mixed)
        return to.view(to.product("shortconv.out_proj", mixed, to.hidden))
    return _mamba(to, spec, normed)


def _lightning(to: Builder, spec: Recurrent, normed: Tensor) -> Tensor:
    """Add lightning attention, whose tokens decay by their distance in a block (minimax-01.cpp)."""
    inner, state = spec.inner_dim, spec.state[0].elements
    width = state // inner
    heads, tokens = inner // width, to.room.rows
    slopes, query_decay, key_decay, distances = to.decays(heads, tokens)
    to.gathered(0)
    kept = to.gathered(state)
    joined = to.over(to.product("attn_qkv", to.view(normed), 3 * inner))
    part = to.view(joined, inner)
    decayed = to.op(inner, part, to.over(to.over(query_decay)))
    earlier = to.op(inner, to.view(kept), to.view(decayed))
    values = to.op(inner, part)
    scores = to.graph.node(FLOAT * heads * tokens * to.room.rows, part)
    scores = to.over(scores, to.view(to.over(to.over(distances))))
    mixed = to.over(earlier, to.op(inner, values, scores))
    to.graph.expand(mixed)
    block = to.over(to.over(to.over(slopes)))
    carried = to.graph.node(FLOAT * state, to.view(kept), to.view(block))
    keys = to.op(inner, to.view(to.op(inner, part, to.over(to.over(key_decay)))))
    carried = to.over(carried, to.graph.node(FLOAT * state, keys, values))
    to.graph.write(to.cache_place, to.view(carried))
    gate = to.over(to.product("attn_gate", to.view(normed), inner))
    out = to.scaled(to.op(inner, to.view(to.op(inner, to.view(mixed)))))
    return to.view(to.product("attn_output", to.over(gate, out), to.hidden))


def _mamba(to: Builder, spec: Recurrent, normed: Tensor) -> Tensor:
    inner, state = spec.inner_dim, sum(state.elements for state in spec.state[-1:])
    shifted = spec.state[0].elements if len(spec.state) > 1 else 0
    kept = to.gathered(shifted)
    channels = max(inner, shifted // (_MAMBA_KERNEL - 1))
    # The first generation has a step for every channel, the second for every head.
    is_first = channels == inner
    heads = 0 if is_first else to.weights.numbers("ssm_dt.bias")
    projected = to.product(
        "ssm_in", to.view(normed) if is_first else normed, inner + channels + heads
    )
    convolved = to.convolved(kept, to.view(projected, channels), channels)
    if is_first:
        return _first(to, inner, state, projected, convolved)
    steps = to.scaled(to.op(heads, to.view(projected, heads)))
    parts = [to.view(convolved, width) for width in (inner, channels - inner, channels - inner)]
    scanned = to.scan(inner, state, parts[0], steps, *parts[1:])
    scanned.root.place = to.place  # it has a weight, and too few rows to be taken over
    skipped = to.placed(to.op(inner, parts[0], to.vector(heads)), to.place)
    skipped = to.over(skipped, scanned)
    out = to.op(inner, to.op(inner, to.view(projected, inner)), skipped)
    if to.weights.largest.get("ssm_norm.weight"):
        out = to.view(to.scaled(to.op(inner, to.view(out))))
    return to.product("ssm_out", to.view(out), to.hidden)


def _first(to: Builder, inner: int, state: int, projected: Tensor, convolved: Tensor) -> Tensor:
    """Mamba's first generation: its steps, inputs and outputs are products of the convolution."""
    size, rank = state // inner, -(-to.hidden // _MAMBA_RANK)
    rank = max(rank, to.weights.numbers("ssm_x.weight") - 2 * size)
    joined = to.product("ssm_x", convolved, rank + 2 * size)
    steps, inputs, outputs = (to.view(joined, width) for width in (rank, size, size))
    if to.weights.largest.get("ssm_b_norm.weight"):
        steps = to.scaled(to.op(rank, steps))
        inputs, outputs = (to.scaled(to.op(size, each)) for each in (inputs, outputs))
    else:
        steps = to.op(rank, steps)
    steps = to.scaled(to.product("ssm_dt", steps, inner))
    scanned = to.scan(inner, state, to.view(convolved), steps, inputs, outputs)
    scanned.root.place = to.place
    skipped = to.over(to.scaled(convolved), scanned)
    out = to.op(inner, to.op(inner, to.view(projected, inner)), skipped)
    return to.view(to.product("ssm_out", out, to.hidden))
