"""Bytes of recurrent and convolution states, which do not depend on tokens."""

from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes


def state_bytes(model: Model, batch: int) -> int:
    """Return the bytes of all states of ``batch`` sequences."""
    return batch * sum(
        dtypes.nbytes(state.elements, "F32" if state.float32 else model.dtype)
        for state in model.states()
    )


def viewed_bytes(model: Model, batch: int, tokens: int, *, decoding: bool = False) -> int:
    """Return what the states keep alive beyond themselves after a chunk of ``tokens``.

    A slice shares the buffer of the array it was cut from (mlx slicing.cpp), so that
    `nbytes` tells less than memory holds; right to within one token. ``decoding`` asks for what
    is left once single tokens follow: a compiled function takes over its input's buffer whatever
    its size (mlx compiled.cpp, compiled_allocate_outputs), as Jamba's scan does.
    """
    return batch * sum(
        dtypes.nbytes(state.view_elements * tokens, model.dtype)
        for state in model.states()
        if state.survives_decode or not decoding
    )
