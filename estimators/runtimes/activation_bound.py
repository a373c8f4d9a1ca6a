"""A bound of what a runtime computes with, where its own plan of buffers is not described."""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod

from memfit.estimators.arch.model import Layer, Model, Part
from memfit.estimators.checkpoint.manifest import Tensor

# A row of each matrix a token: its result, its activation or norm, and a copy of it.
_USES = 3
_RESIDUALS = 4
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


def activation_bound(
    model: Model, tensors: Iterable[Tensor] = (), *, rows: int, logit_rows: int, width: int
) -> int:
    """Return the bytes of the widest layer's results and the logits, nothing sharing room.

    ``rows`` are the tokens computed at once, ``width`` the bytes of an element; ``tensors`` are
    those of a GGUF file, else the layers know their own. Attention holds no scores here: every
    runtime this is used for computes it fused.
    """
    elements = rows * (_USES * _widest(model, tensors) + _RESIDUALS * model.hidden_size)
    return width * (elements + logit_rows * model.vocab_size)


def _widest(model: Model, tensors: Iterable[Tensor]) -> int:
    """The most elements a token that a layer's matrices result in."""
    widths = Counter(dict(enumerate(map(_layer_elements, model.layers))))
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        if found and int(found[1]) < len(model.layers):
            index = int(found[1])
            # ggml's shapes begin with the width of the operand.
            shape = tuple(reversed(tensor.shape))
            routed = "_exps." in found[2]
            widths[index] += _results(shape, model.layers[index], routed=routed)
    return max(widths.values(), default=0)


def _layer_elements(layer: Layer) -> int:
    return sum(
        _results(module.shape, layer, routed=module.part is Part.EXPERTS)
        for module in layer.modules
    )


def _results(shape: tuple[int, ...], layer: Layer, *, routed: bool) -> int:
    """Elements a token of one matrix's result."""
    if routed and len(shape) > 2:
        return (layer.experts.top_k if layer.experts else 1) * shape[1]
    return prod(shape[:-1] or shape)
