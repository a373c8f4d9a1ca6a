"""Experts without a slot that are skipped: the others get their share of the router's scores."""

import gc
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def outputs_class() -> Any:
    """Return the class of the outputs of each token's experts, some of which are missing.

    mlx-lm's classes multiply them by the router's scores. The scores of the missing are then
    divided among the others in the ratio of their scores, and ``on_weighted`` is called.
    """
    import mlx.core as mx

    class Outputs(mx.array):
        def __init__(self, outputs: Any, absent: Any, on_weighted: Callable[[], None]) -> None:
            super().__init__(mx.where(absent[..., None], 0, outputs))
            self.absent, self.on_weighted = absent, on_weighted

        def astype(self, dtype: Any, stream: Any = None) -> Any:
            return Outputs(super().astype(dtype, stream), self.absent, self.on_weighted)

        def squeeze(self, axis: Any = None, stream: Any = None) -> Any:
            self.on_weighted()  # a token has one expert
            return super().squeeze(axis, stream=stream)

        def __mul__(self, scores: Any) -> Any:
            self.on_weighted()
            left = mx.where(self.absent[..., None], 0, scores)
            total, rest = (part.sum(axis=-2, keepdims=True) for part in (scores, left))
            share = mx.where(rest == 0, 0, total / mx.where(rest == 0, 1, rest))
            return super().__mul__((left * share).astype(scores.dtype))

        __rmul__ = __mul__

    return Outputs


def weigh_uncompiled(model: Any) -> None:
    """Let a class call its own function instead of a compiled one, which only sees plain arrays."""
    for module in {sys.modules[type(each).__module__] for each in model.modules()}:
        function = getattr(module, "aggregate_expert_outputs", None)
        if function and type(function) is not FunctionType:  # isfunction is true for a compiled one
            originals = (each for each in gc.get_referents(function) if type(each) is FunctionType)
            module.aggregate_expert_outputs = next(originals)  # type: ignore[attr-defined]
