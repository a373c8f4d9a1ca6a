"""The layers of RWKV 6 and 7, as llama.cpp puts them into its graph.

Source: src/models/rwkv6-base.cpp, rwkv7-base.cpp, rwkv6.cpp and rwkv7.cpp of build b11549.
"""

from memfit.estimators.arch.mixer_kinds import recurrent_of
from memfit.estimators.arch.model import Layer
from memfit.estimators.arch.specs import Recurrent
from memfit.estimators.runtimes.llama_cpp.builder import Builder
from memfit.estimators.runtimes.llama_cpp.feed_forward import feed
from memfit.estimators.runtimes.llama_cpp.ggml import Tensor, View

_RANK = 64  # of the products that make decays and shares, where no file tells
_MIXTURES = 6  # of a token and the one before; RWKV 6 has five


def embedded(to: Builder, rows: Tensor) -> Tensor:
    """Add the norm of the embedding."""
    return to.scaled(to.scaled(to.op(to.hidden, rows)))


def layer(to: Builder, spec: Layer, residual: Tensor, *, is_last: bool) -> Tensor:
    """Add a layer; of the last one only rows of the outputs go on."""
    mixer, hidden = recurrent_of(spec.mixers[0]), to.hidden
    assert mixer
    shifts = to.gathered(mixer.state[0].elements)
    normed = to.scaled(to.scaled(to.op(hidden, to.view(residual))))
    before = to.op(hidden, to.view(shifts), to.view(normed))
    mixed = _mixed(to, mixer, normed, before)
    inputs = to.op(hidden, to.view(mixed), to.view(residual))
    fed = to.scaled(to.scaled(to.op(hidden, inputs)))
    before = to.op(hidden, to.view(shifts), to.view(fed))
    kept = to.graph.node(shifts.nbytes, to.view(normed), to.view(fed))
    to.graph.write(to.cache_place, View(kept, kept.nbytes))
    inputs, fed, before = (to.view(each) for each in (inputs, fed, before))
    if is_last:
        to.rows = to.outputs
        inputs, fed, before = (to.op(hidden, x, to.output_rows) for x in (inputs, fed, before))
    return to.over(_channels(to, spec, fed, before), inputs)


def _is_six(to: Builder) -> bool:
    return to.model.model_type.startswith("rwkv6")


def _channels(to: Builder, spec: Layer, fed: Tensor, before: Tensor) -> Tensor:
    if spec.feed_forward and spec.feed_forward.gated:  # ARWKV and RWKV 6 made of Qwen2
        return feed(to, spec.feed_forward, fed)
    inner = spec.feed_forward.intermediate if spec.feed_forward else to.hidden
    change = to.over(before, fed)
    keys = to.over(to.scaled(change), fed)
    gate = None
    if _is_six(to):
        gate = to.product("channel_mix_receptance", to.over(to.scaled(change), fed), to.hidden)
    active = to.over(to.over(to.product("channel_mix_key", keys, inner)))
    value = to.product("channel_mix_value", active, to.hidden)
    return to.over(to.over(gate), value) if gate else value


def _mixed(to: Builder, spec: Recurrent, normed: Tensor, before: Tensor) -> Tensor:
    """Time mixing: its recurrence with what is read of each token, a norm and a gate."""
    hidden, change = to.hidden, to.over(before, normed)
    gate, more, sources = (_six if _is_six(to) else _seven)(to, normed, change)
    states = to.gathered(spec.state[-1].elements)
    result = to.graph.node(to.nbytes(hidden) + states.nbytes, *sources, to.view(states))
    to.graph.write(to.cache_place, View(result, states.nbytes))
    out = to.op(hidden, to.view(result, hidden))
    out = to.scaled(to.placed(to.op(hidden, to.view(out), to.vector(hidden)), to.place))
    if more:
        out = to.over(out, to.view(more))
    return to.product("time_mix_output", to.over(out, gate), hidden)


def _seven(to: Builder, normed: Tensor, change: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    hidden = to.hidden
    mixtures = to.over(to.scaled(to.op(_MIXTURES * hidden, change)), normed)
    one = to.view(mixtures, hidden)
    read = to.product("time_mix_receptance", one, hidden)
    decay = to.scaled(_pair(to, "time_mix_w", one, active=True))
    decay = to.over(to.over(to.over(decay)))
    key, value = (to.product(f"time_mix_{name}", one, hidden) for name in ("key", "value"))
    if to.first_value is None:
        to.first_value = value
    else:
        share = to.over(to.scaled(_pair(to, "time_mix_v", one)))
        value = to.over(value, to.over(to.over(to.first_value, value), share))
    gate = _pair(to, "time_mix_g", one, active=True)
    rate = to.over(to.scaled(_pair(to, "time_mix_a", one)))
    unit = to.op(hidden, to.view(to.scaled(key)))
    scaled = to.scaled(key)
    key = to.over(key, to.over(to.over(rate, scaled), scaled))
    parts = [to.view(each) for each in (read, decay, key, value)]
    sources = [*parts, to.over(unit), to.over(unit, to.view(rate))]
    weighed = to.op(hidden // 64, to.scaled(to.op(hidden, parts[2], parts[0])))
    return gate, to.op(hidden, parts[3], weighed), sources


def _six(to: Builder, normed: Tensor, change: Tensor) -> tuple[Tensor, None, list[Tensor]]:
    hidden, count = to.hidden, 5
    change = to.view(change)
    first = to.placed(to.op(hidden, change, to.vector(hidden)), to.place)
    rank = to.weights.numbers("time_mix_w1.weight") or count * _RANK
    ranks = to.over(to.product("time_mix_w1", to.over(first, to.view(normed)), rank))
    mixtures = to.product("time_mix_w2", to.op(rank, to.view(ranks)), count * hidden)
    mixtures = to.over(to.over(to.scaled(mixtures), change), to.view(normed))
    one = to.view(mixtures, hidden)
    read, key, value, gate = (
        to.product(f"time_mix_{name}", one, hidden)
        for name in ("receptance", "key", "value", "gate")
    )
    decay = to.scaled(_pair(to, "time_mix_decay_w", one, active=True))
    decay = to.over(to.over(to.over(decay)))
    return to.over(gate), None, [to.view(each) for each in (key, value, read, decay)]


def _pair(to: Builder, name: str, tensor: Tensor, *, active: bool = False) -> Tensor:
    """A product over few ranks."""
    ranks = to.product(f"{name}1", tensor, to.weights.numbers(f"{name}1.weight") or _RANK)
    return to.product(f"{name}2", to.over(ranks) if active else ranks, to.hidden)
