"""The compute buffers of a model: the graph of one micro-batch on a full context, laid out."""

from collections import Counter
from collections.abc import Iterator

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.runtimes.llama_cpp.builder import FLOAT, Builder, Context
from memfit.estimators.runtimes.llama_cpp.feed_forward import feed
from memfit.estimators.runtimes.llama_cpp.ggml import Place, Sizes, Stored, Tensor
from memfit.estimators.runtimes.llama_cpp.mixers import mix
from memfit.estimators.runtimes.llama_cpp.placement import Placement, Weights

# Equal layers reach a fixed point: the second lies as all that follow.
_REPEATED = 2


def compute_buffers(
    model: Model, context: Context, weights: Weights, placement: Placement
) -> Sizes:
    """Return the bytes of the compute buffers that llama.cpp reserves."""
    to = Builder(context, weights, model.hidden_size, backend=placement.backend)
    outputs = to.graph.input(4 * to.outputs)
    wide, residual = _embedded(to, model.deepstack_layers, mixed=context.mixed)
    for index in _representatives(model, placement):
        to.place = placement.of(index)
        to.experts_place = placement.of_experts(index)
        is_last = index == len(model.layers) - 1
        residual = _layer(to, model.layers[index], residual, outputs if is_last else None)
        if index < model.deepstack_layers:
            residual = to.over(residual, wide)
    to.place = placement.of(placement.blocks)
    normed = to.norm(residual)
    normed.kept = True
    to.product("output", normed, model.vocab_size).kept = True
    return to.graph.reserve(placement.backend)


def is_described(model: Model) -> bool:
    """Whether all large operations of the layers are written down.

    Not those of RWKV (rwkv6-base.cpp, rwkv7-base.cpp) and Gemma 3n (four streams, gemma3n.cpp):
    beside the logits of a micro-batch they do not count, beside those of one token they do.
    """
    rwkv = any(mixer.kind == "rwkv" for mixer in model.mixers())
    return not rwkv and not model.model_type.startswith("gemma3n")


def _representatives(model: Model, placement: Placement) -> Iterator[int]:
    """Yield the layers that the buffers follow from: each kind in each place, twice."""
    seen: Counter[tuple[object, object]] = Counter()
    before: object = None
    for index, layer in enumerate(model.layers):
        places = placement.of(index), placement.of_experts(index)
        kind = layer.mixers, layer.feed_forward, places
        seen[before, kind] += 1
        if seen[before, kind] <= _REPEATED or index == len(model.layers) - 1:
            yield index
        before = kind


def _embedded(to: Builder, deepstack_layers: int, *, mixed: bool) -> tuple[Tensor, Tensor]:
    """The input, and its part that the first layer reads: the rows of the embedding.

    With the room of rows that a program may give instead, which have the inputs of deepstack
    layers behind them (n_embd_inp).
    """
    table, width = Stored(0, Place.HOST), to.hidden * (1 + deepstack_layers)
    tokens = to.graph.input(4 * to.rows)
    # Source: build_inp_embd. This one is read by no operation.
    to.graph.input(FLOAT * width * to.rows)
    rows = _rows(to, table, tokens)
    if mixed:
        given, slots = (to.graph.input(nbytes * to.rows) for nbytes in (FLOAT * width, 8))
        others = _rows(to, table, to.graph.input(4 * to.rows))
        rows, others = (_padded(to, tensor, width) for tensor in (rows, others))
        merged = to.op(width, given)
        merged.kept = True
        to.graph.write(None, others, slots, merged)
    else:
        rows = _padded(to, rows, width)
    if not deepstack_layers:
        return rows, rows
    return rows, Stored(FLOAT * to.hidden * to.rows, None, (rows,))


def _rows(to: Builder, table: Tensor, tokens: Tensor) -> Tensor:
    rows = to.op(to.hidden, table, tokens)
    rows.place = Place.HOST
    return rows


def _padded(to: Builder, rows: Tensor, width: int) -> Tensor:
    return rows if width == to.hidden else to.op(width, rows)


def _layer(to: Builder, layer: Layer, residual: Tensor, outputs: Tensor | None) -> Tensor:
    """Add a layer; the last one goes on with the rows of the outputs only."""
    mixed: Tensor | None = None
    for mixer in layer.mixers:
        result = mix(to, mixer, to.norm(residual))
        mixed = to.over(result, mixed) if mixed else result
    if mixed:
        residual = _added(to, mixed, residual, outputs)
        outputs = None
    if layer.feed_forward:
        fed = feed(to, layer.feed_forward, to.norm(residual))
        residual = _added(to, fed, residual, outputs)
    return residual


def _added(to: Builder, block: Tensor, residual: Tensor, outputs: Tensor | None) -> Tensor:
    if outputs:
        to.rows = to.outputs
        block, residual = (to.op(to.hidden, rows, outputs) for rows in (block, residual))
    return to.over(block, residual)
