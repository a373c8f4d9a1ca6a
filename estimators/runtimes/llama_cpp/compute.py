"""The compute buffers of a model: the graph of one micro-batch on a full context, laid out."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.runtimes.llama_cpp import rwkv
from memfit.estimators.runtimes.llama_cpp.builder import FLOAT, Builder, Context
from memfit.estimators.runtimes.llama_cpp.feed_forward import feed
from memfit.estimators.runtimes.llama_cpp.ggml import Place, Sizes, Stored, Tensor
from memfit.estimators.runtimes.llama_cpp.mixers import mix, skip
from memfit.estimators.runtimes.llama_cpp.per_layer import (
    added,
    merged,
    per_layer_width,
    projected,
    selected,
    stacked,
)
from memfit.estimators.runtimes.llama_cpp.per_layer import layer as stream_layer
from memfit.estimators.runtimes.llama_cpp.placement import Placement, Weights

# Equal layers reach a fixed point: the second lies as all that follow.
_REPEATED = 2
# Hidden states that are kept beside those described, as a bound: of Arctic's two blocks, and of the
# router of SmallThinker, which reads what is before attention.
_SPARE = {"arctic": 4, "smallthinker": 1}
_MINIMAX = "minimax-01"
# llama-arch.cpp, llm_arch_supports_mixed_batch.
_UNMIXED = ("cogvlm",)
# They add a block to the hidden state, whose room the sum takes over; others add it to the block.
# After attention, and after the feed-forward block.
_RESIDUAL_FIRST = (("jamba", "lfm2", "lfm2moe", "openelm"), ("jamba", "lfm2", "lfm2moe", "phi3"))


class _Inputs(NamedTuple):
    """What the first layer reads, and what others read beside the hidden state."""

    hidden: Tensor
    wide: Tensor
    """The rows with the inputs of deepstack layers behind them."""
    per_layer: Tensor | None
    """The embeddings of all layers."""


def compute_buffers(
    model: Model, context: Context, weights: Weights, placement: Placement
) -> Sizes:
    """Return the bytes of the compute buffers that llama.cpp reserves."""
    to = Builder(context, weights, model, placement)
    inputs = _inputs(to, placement, mixed=context.mixed)
    if count := _SPARE.get(model.model_type):
        spare = to.graph.leaf(count * to.nbytes(to.hidden))
        spare.kept = True
        to.graph.write(placement.of(placement.blocks), spare)
    hidden, laid_out = inputs.hidden, set(_representatives(model, placement))
    for index, layer in enumerate(model.layers):
        to.layer, to.place = index, placement.of(index)
        to.experts_place = placement.of_experts(index)
        if index in laid_out:
            hidden = _any_layer(to, layer, hidden, inputs)
        else:
            skip(to, layer)
    to.layer, to.place = -1, placement.of(placement.blocks)
    normed = to.norm(merged(to, hidden) if _has_streams(model) else hidden)
    normed.kept = True
    if model.model_type == "bitnet":  # its head is the embedding, where that is (bitnet.cpp)
        to.place = Place.HOST
    logits = to.product("output", normed, model.vocab_size)
    if model.model_type == _MINIMAX:  # a mask of tokens that it does not answer with
        logits = to.over(logits, to.graph.input(FLOAT * model.vocab_size))
    if model.model_type == "chameleon":  # a copy without the logits of images (chameleon.cpp)
        logits = to.op(model.vocab_size, logits)
    logits.kept = True
    to.graph.expand(logits)
    return to.graph.reserve(placement.backend, with_gap=has_gap(model, placement))


def _inputs(to: Builder, placement: Placement, *, mixed: bool) -> _Inputs:
    model, rows = to.model, None
    streams, has_own = _has_streams(model), per_layer_width(to.weights) > 0
    to.place = placement.of(0)
    if has_own and not streams:
        rows = selected(to)
    mixed = mixed and model.model_type not in _UNMIXED
    wide, hidden = _embedded(to, model.deepstack_layers, mixed=mixed)
    if has_own or model.model_type.startswith("gemma3"):
        hidden = to.over(hidden, to.graph.input(FLOAT * to.rows))
        to.graph.expand(hidden)
    if has_own and streams:
        rows = to.over(selected(to))
        to.graph.expand(rows)
    per_layer = projected(to, hidden, rows) if rows else None
    to.place = placement.of(placement.blocks)
    if streams:
        hidden = stacked(to, hidden)
    if _is_rwkv(model):
        hidden = rwkv.embedded(to, hidden)
    return _Inputs(hidden, wide, per_layer)


def _any_layer(to: Builder, layer: Layer, hidden: Tensor, inputs: _Inputs) -> Tensor:
    # CogVLM goes on with all rows (cogvlm.cpp).
    is_last = to.layer == len(to.model.layers) - 1 and to.model.model_type not in _UNMIXED
    if inputs.per_layer and _has_streams(to.model):
        return stream_layer(to, layer, hidden, inputs.per_layer)
    if _is_rwkv(to.model):
        return rwkv.layer(to, layer, hidden, is_last=is_last)
    hidden = _layer(to, layer, hidden, is_last=is_last)
    if inputs.per_layer:
        hidden = added(to, hidden, inputs.per_layer)
    return to.over(hidden, inputs.wide) if to.layer < to.model.deepstack_layers else hidden


def _has_streams(model: Model) -> bool:
    return model.model_type.startswith("gemma3n")


def _is_rwkv(model: Model) -> bool:
    return any(mixer.kind == "rwkv" for mixer in model.mixers())


def is_bound(model: Model, placement: Placement) -> bool:
    """Whether the buffers are an upper bound."""
    return has_gap(model, placement) or model.model_type in _SPARE


def has_gap(model: Model, placement: Placement) -> bool:
    """Whether the buffers are a bound: of a divided model with Mamba, RWKV or KDA, and of Gemma 3n.

    The splits of its graph follow from small operations too, which are not all described.
    """
    is_moved = placement.host_experts or placement.overrides or not placement.kv_offload
    is_divided = placement.gpu_layers <= placement.blocks or is_moved
    has_small = any(mixer.kind in ("mamba", "rwkv") for mixer in model.mixers())
    has_small = has_small or model.model_type.startswith(("gemma3n", "kimi"))
    return placement.backend != "cpu" and bool(is_divided) and has_small


def _representatives(model: Model, placement: Placement) -> Iterator[int]:
    """Yield the layers that the buffers follow from: each kind in each place, twice.

    Those that read the cache of another are all in the split of its last owner, and each fetches
    its own copy where the cache is on the host.
    """
    seen: Counter[tuple[object, object]] = Counter()
    before: object = None
    reading = [any(not mixer.owns_cache for mixer in layer.mixers) for layer in model.layers]
    for index, layer in enumerate(model.layers):
        places = placement.of(index), placement.of_experts(index)
        kind = layer.mixers, layer.feed_forward, places
        seen[before, kind] += 1
        is_last = index == len(model.layers) - 1
        if is_last or seen[before, kind] <= _REPEATED or any(reading[index : index + 2]):
            yield index
        before = kind


def _embedded(to: Builder, deepstack_layers: int, *, mixed: bool) -> tuple[Tensor, Tensor]:
    """The input, and its part that the first layer reads: the rows of the embedding.

    With the room of rows that a program may give instead, which have the inputs of deepstack
    layers behind them (n_embd_inp).
    """
    table, width = Stored(0, Place.HOST), to.hidden * (1 + deepstack_layers)
    rows = _rows(to, table)
    others = _rows(to, table) if mixed else rows
    rows, others = (_padded(to, tensor, width) for tensor in (rows, others))
    to.graph.expand(rows)
    # Source: build_inp_embd. This one is read by no operation.
    to.graph.expand(to.graph.input(FLOAT * width * to.rows))
    if mixed:
        slots, given = (to.graph.input(nbytes * to.rows) for nbytes in (8, FLOAT * width))
        merged = to.op(width, given)
        merged.kept = True
        to.graph.write(None, others, slots, merged)
    return rows, to.view(rows, to.hidden) if deepstack_layers else rows


def _rows(to: Builder, table: Tensor) -> Tensor:
    rows = to.op(to.hidden, table, to.graph.input(4 * to.rows))
    rows.place = Place.HOST
    to.graph.expand(rows)
    return rows


def _padded(to: Builder, rows: Tensor, width: int) -> Tensor:
    return rows if width == to.hidden else to.op(width, rows)


def _layer(to: Builder, layer: Layer, residual: Tensor, *, is_last: bool) -> Tensor:
    """Add a layer; the last one goes on with the rows of the outputs only."""
    names = to.weights.largest
    if _is_parallel(to, layer):
        return _parallel(to, layer, residual, is_last=is_last)
    if to.model.model_type == _MINIMAX:
        return _normed_residuals(to, layer, residual, is_last=is_last)
    mixed: Tensor | None = None
    for mixer in layer.mixers:
        result = mix(to, mixer, to.norm(residual))
        mixed = to.over(mixed, result) if mixed else result
    if mixed:
        if {"post_attention_norm.weight", "ffn_norm.weight"} <= names.keys():
            mixed = to.norm(mixed)
        residual = _added(to, 0, mixed, residual, is_last=is_last)
        is_last = False
    if layer.feed_forward:
        fed = feed(to, layer.feed_forward, to.norm(residual))
        if "post_ffw_norm.weight" in names:
            fed = to.norm(fed)
        residual = _added(to, 1, fed, residual, is_last=is_last)
    return residual


def _normed_residuals(to: Builder, layer: Layer, hidden: Tensor, *, is_last: bool) -> Tensor:
    """Add a layer whose blocks are added to their scaled inputs (minimax-01.cpp)."""
    assert layer.feed_forward
    normed = to.norm(hidden)
    mixed = mix(to, layer.mixers[0], normed)
    if is_last:
        to.rows = to.outputs
        mixed, normed = (to.op(to.hidden, rows, to.output_rows) for rows in (mixed, normed))
    normed = to.norm(to.over(mixed, to.over(normed)))
    return to.over(feed(to, layer.feed_forward, normed), to.over(normed))


def _is_parallel(to: Builder, layer: Layer) -> bool:
    """Whether attention and the feed-forward block read the same norm, as one norm tells."""
    norms = {
        f"{name}.weight"
        for name in ("ffn_norm", "post_attention_norm", "ffn_norm_exps", "attn_output_norm")
    }
    names = to.weights.largest.keys()
    has_one = "attn_norm.weight" in names and not norms & names
    is_parallel = has_one or to.model.model_type == "gptneox"
    return is_parallel and bool(layer.feed_forward) and len(layer.mixers) == 1


def _parallel(to: Builder, layer: Layer, residual: Tensor, *, is_last: bool) -> Tensor:
    """Source: command-r.cpp, falcon.cpp, plamo.cpp, stablelm.cpp and phi2.cpp."""
    assert layer.feed_forward
    fed_first = to.model.model_type in ("falcon", "plamo")
    normed = to.norm(residual)
    mixed = mix(to, layer.mixers[0], normed)
    if is_last:
        to.rows = to.outputs
        mixed, residual, normed = (
            to.op(to.hidden, rows, to.output_rows) for rows in (mixed, residual, normed)
        )
    if "ffn_norm.weight" in to.weights.largest:
        normed = to.norm(residual)
    fed = feed(to, layer.feed_forward, normed)
    if to.model.model_type.startswith(("command-r", "cohere2", "gptneox")):
        return to.over(to.over(fed, residual), mixed)
    if to.model.model_type == "stablelm":
        return to.over(fed, to.over(mixed, residual))
    return to.over(to.over(*(fed, mixed) if fed_first else (mixed, fed)), residual)


def _added(to: Builder, part: int, block: Tensor, residual: Tensor, *, is_last: bool) -> Tensor:
    if is_last:
        to.rows = to.outputs
        block, residual = (to.op(to.hidden, rows, to.output_rows) for rows in (block, residual))
    first = to.model.model_type in _RESIDUAL_FIRST[part]
    return to.over(*(residual, block) if first else (block, residual))
