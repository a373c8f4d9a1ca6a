"""A bound of what a runtime computes with, where its own plan of buffers is not described."""

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Module, Part

# A row of each matrix a token: its result, its activation or norm, and a copy of it.
_USES = 3
_RESIDUALS = 4


def activation_bound(model: Model, *, rows: int, logit_rows: int, width: int) -> int:
    """Return the bytes of the widest layer's results and the logits, nothing sharing room.

    ``rows`` are the tokens computed at once, ``width`` the bytes of an element. Attention holds no
    scores here: every runtime this is used for computes it fused.
    """
    widest = max(map(_layer_elements, model.layers), default=0)
    elements = rows * (_USES * widest + _RESIDUALS * model.hidden_size)
    return width * (elements + logit_rows * model.vocab_size)


def _layer_elements(layer: Layer) -> int:
    return sum(_results(module, layer) for module in layer.modules)


def _results(module: Module, layer: Layer) -> int:
    """Elements a token of one module's result."""
    if module.part is Part.EXPERTS and len(module.shape) > 2:
        return (layer.experts.top_k if layer.experts else 1) * module.shape[1]
    outer = module.shape[:-1] or module.shape
    result = 1
    for size in outer:
        result *= size
    return result
