"""An upper bound of llama.cpp's compute and output buffers.

llama.cpp lays out the graph of one micro-batch and lets tensors share room once they are used up
(ggml/src/ggml-alloc.c); how well they share is not described here. The bound lets nothing share:
the logits of a whole micro-batch, everything one layer computes, and the inputs twice, since a
backend copies them. A layer computes a row of each of its matrices a token; `_USES` counts what is
made of that row (its norm or activation, its rotated or contiguous copy).
docs/gguf.md compares it with buffers that llama.cpp reported.
"""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import Attention, GatedDelta, LatentAttention, Recurrent
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.runtimes.llama_cpp.caches import Cells, state_elements

_WIDTH = 4  # activations are float32
_MASK_WIDTH = 2  # of the flash attention kernel; without it masks are float32
_USES = 3
_RESIDUALS = 4  # input, output and both sums of a layer, at the model's width
_INPUTS = 2
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


class Compute(NamedTuple):
    """Bytes of the bound by what they are for."""

    logits: int
    layer: int
    inputs: int
    output: int

    @property
    def nbytes(self) -> int:
        """Return the bound."""
        return sum(self)


def compute_bound(model: Model, tensors: Iterable[Tensor], room: Cells) -> Compute:
    """Return the bound for one micro-batch on a full context, with flash attention.

    Where the model's attention does not use it, its scores are counted too.
    """
    tokens = room.microbatch
    widths = _layer_widths(model, tensors)
    layers = [
        _WIDTH * (widths[index] * tokens + _apart(model, index, room))
        for index in range(len(model.layers))
    ]
    residuals = _RESIDUALS * model.hidden_size * tokens * _WIDTH
    return Compute(
        logits=model.vocab_size * tokens * _WIDTH,
        layer=max(layers, default=0) + residuals,
        inputs=_INPUTS * (_masks(model, room) + model.hidden_size * tokens * _WIDTH),
        output=model.vocab_size * room.sequences * _WIDTH,
    )


def _layer_widths(model: Model, tensors: Iterable[Tensor]) -> Counter[int]:
    """Elements a token that each layer computes."""
    widths: Counter[int] = Counter()
    for tensor in tensors:
        found = _LAYER.fullmatch(tensor.name)
        if found and int(found[1]) < len(model.layers):
            index = int(found[1])
            widths[index] += _uses(tensor, _chosen(model, index))
    return widths


def _chosen(model: Model, index: int) -> int:
    experts = model.layers[index].experts
    return experts.top_k if experts else 1


def _uses(tensor: Tensor, experts: int) -> int:
    """Elements a token that follow from one tensor: its outputs and what is made of them."""
    if len(tensor.shape) < 2:
        return prod(tensor.shape)
    if "_exps." in tensor.name:
        return _USES * tensor.shape[1] * experts
    return _USES * prod(tensor.shape[1:])


def _apart(model: Model, index: int, room: Cells) -> int:
    """Elements that do not follow from a matrix: states, and scores where they are kept."""
    total = 0
    for mixer in model.layers[index].mixers:
        total += 2 * sum(state_elements(mixer)) * room.sequences
        match mixer:
            case Attention():
                total += 0 if mixer.fused else 2 * mixer.heads * room.full * room.microbatch
            case LatentAttention():
                total += _USES * room.full * room.microbatch if mixer.indexer else 0
            case GatedDelta() | Recurrent():
                pass
            case _:
                assert_never(mixer)
    return total


def _masks(model: Model, room: Cells) -> int:
    """One mask for all layers of a kind."""
    cells = {
        room.full if window is None else room.sliding(window)
        for window in {mixer.window for mixer in model.mixers()}
    }
    return sum(cells) * room.microbatch * _MASK_WIDTH
