"""Embeddings of every layer (Gemma 3n and 4), and the four streams of Gemma 3n (AltUp).

Source: src/models/gemma4.cpp and gemma3n.cpp of build b11549.
"""

from memfit.estimators.arch.mixer_kinds import attention_of, dense_of
from memfit.estimators.arch.model import Layer
from memfit.estimators.runtimes.llama_cpp.builder import Builder
from memfit.estimators.runtimes.llama_cpp.ggml import Place, Stored, Tensor
from memfit.estimators.runtimes.llama_cpp.mixers import mix
from memfit.estimators.runtimes.llama_cpp.placement import Weights

_STREAMS = 4  # llama-hparams.h, n_altup
_SPARSE_LAYERS = 10  # models.h, n_layer_sparsity
_LAUREL_RANK = 64  # gemma3n.cpp, laurel_rank


def per_layer_width(weights: Weights) -> int:
    """Return the width of a layer's embedding, 0 where there is none."""
    return weights.numbers("per_layer_proj_norm.weight")


def selected(to: Builder) -> Tensor:
    """Add the rows of the table, for all layers together."""
    width = per_layer_width(to.weights) * len(to.model.layers)
    rows = to.op(width, Stored(0, Place.HOST), to.graph.input(4 * to.rows))
    rows.place = Place.HOST
    to.graph.expand(rows)
    return rows


def projected(to: Builder, hidden: Tensor, rows: Tensor) -> Tensor:
    """Return the inputs of all layers: the rows and a projection of the hidden state."""
    width = per_layer_width(to.weights) * len(to.model.layers)
    own = to.over(to.product("per_layer_model_proj", hidden, width))
    own = to.over(to.over(to.op(width, to.view(own))), to.over(rows))
    return to.op(width, to.over(own))


def _gated(to: Builder, hidden: Tensor, inputs: Tensor) -> Tensor:
    width = per_layer_width(to.weights)
    gate = to.over(to.product("inp_gate", hidden, width))
    return to.norm(to.product("proj", to.over(gate, inputs), to.hidden))


def added(to: Builder, residual: Tensor, inputs: Tensor) -> Tensor:
    """Add a layer's embedding to its result; of the last layer only rows of the outputs go on."""
    own = to.view(inputs, 0)
    if to.rows != to.room.rows:
        own = to.op(per_layer_width(to.weights), own, to.output_rows)
    return to.over(residual, _gated(to, residual, own))


def stacked(to: Builder, hidden: Tensor) -> Tensor:
    """Return the streams of Gemma 3n."""
    more = (_STREAMS - 1) * to.hidden
    repeated = to.product("altup_proj", to.op(more, hidden), more)
    scaled = to.over(repeated, _magnitude(to, hidden, to.hidden))
    return to.op(_STREAMS * to.hidden, hidden, to.over(scaled, _magnitude(to, repeated, more)))


def _magnitude(to: Builder, tensor: Tensor, width: int) -> Tensor:
    return to.over(to.op(width // to.hidden, to.over(tensor)))


def merged(to: Builder, streams: Tensor) -> Tensor:
    """Return the hidden state that streams are joined to, rows of the outputs alone."""
    more = (_STREAMS - 1) * to.hidden
    rest = to.product("altup_unembd_proj", to.view(streams, more), more)
    target = _magnitude(to, to.view(streams, to.hidden), to.hidden)
    rest = to.over(to.over(rest, target), _magnitude(to, rest, more))
    hidden = to.op(to.hidden, to.view(streams, to.hidden), to.view(rest, to.hidden))
    hidden = to.over(hidden, to.view(rest, to.hidden))
    to.rows = to.outputs
    return to.op(to.hidden, to.over(hidden), to.output_rows)


def layer(to: Builder, spec: Layer, streams: Tensor, inputs: Tensor) -> Tensor:
    """Add a layer of Gemma 3n, which reads and returns all streams."""
    assert spec.feed_forward
    attention, block = attention_of(spec.mixers[0]), dense_of(spec.feed_forward)
    assert attention
    assert block
    width = _STREAMS * to.hidden
    permuted = to.op(width, to.view(streams))
    shares = _routed(to, to.view(streams, to.hidden))
    coefficients = to.product("altup_predict_coef", shares, _STREAMS**2)
    predictions = to.op(width, to.op(width, permuted, to.view(coefficients)))
    predictions = to.over(predictions, streams)
    active = to.view(predictions, to.hidden)
    normed = to.norm(active)
    laurel = to.product("laurel_r", to.product("laurel_l", normed, _LAUREL_RANK), to.hidden)
    laurel = to.over(to.norm(laurel), normed)
    mixed = to.over(to.norm(mix(to, attention, normed)), active)
    mixed = to.over(to.over(mixed, laurel))
    fed = to.over(to.norm(_fed(to, block.intermediate, to.norm(mixed))), mixed)
    innovation = to.op(width, to.op(to.hidden, fed, active))
    coefficients = to.product("altup_correct_coef", _routed(to, fed), _STREAMS)
    shares = to.op(_STREAMS, to.view(to.over(coefficients)))
    corrected = to.over(to.over(innovation, shares), predictions)
    first = _gated(to, to.op(to.hidden, to.view(corrected, to.hidden)), to.view(inputs, 0))
    rest = to.op((_STREAMS - 1) * to.hidden, to.view(corrected), first)
    return to.op(width, to.view(corrected, to.hidden), rest)


def _routed(to: Builder, hidden: Tensor) -> Tensor:
    normed = to.over(to.norm(hidden))
    return to.over(to.product("altup_router", normed, _STREAMS))


def _fed(to: Builder, inner: int, normed: Tensor) -> Tensor:
    up, gate = (to.product(name, normed, inner) for name in ("ffn_up", "ffn_gate"))
    if to.layer < _SPARSE_LAYERS:
        mean = to.op(1, gate)
        spread = to.op(1, to.over(to.over(gate, mean)))
        gate = to.over(gate, to.over(mean, to.over(spread)))
    return to.product("ffn_down", to.over(up, to.over(to.over(gate))), to.hidden)
