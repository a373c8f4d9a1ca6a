"""Bytes of recurrent and convolution states, which do not depend on tokens."""

from collections.abc import Iterable

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import StateBuffer
from memfit.estimators.base import dtypes


def state_bytes(model: Model, batch: int) -> int:
    """Return the bytes of all states of ``batch`` sequences."""
    return batch * sum(
        layers * dtypes.nbytes(state.elements, "F32" if state.float32 else model.dtype)
        for state, layers in model.state_counts.items()
    )


def view_elements(states: Iterable[StateBuffer], *, decoding: bool) -> int:
    """Return the elements per token of a chunk that states keep alive in addition to their own.

    A slice shares the buffer of the array it was cut from (mlx slicing.cpp), so that its nbytes
    are less than it holds; right to within one token. ``decoding`` is for what is left once single
    tokens follow: a compiled function takes over its input's buffer, whatever its size (mlx
    compiled.cpp, compiled_allocate_outputs), as Jamba's scan does.
    """
    return sum(s.view_elements for s in states if s.survives_decode or not decoding)


def view_bytes(model: Model, tokens: int) -> int:
    """Return what the states of a sequence keep alive after a call, in addition to their own."""
    return (
        tokens * view_elements(model.states(), decoding=tokens == 1) * dtypes.nbytes(1, model.dtype)
    )
