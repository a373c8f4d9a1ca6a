"""Bytes of recurrent and convolution states, which do not depend on tokens."""

from memfit.estimators import dtypes
from memfit.estimators.arch.caches import StateBuffer
from memfit.estimators.arch.model import Model


def state_bytes(model: Model, batch: int) -> int:
    """Return the bytes of all states of ``batch`` sequences."""
    return batch * sum(
        dtypes.nbytes(cache.elements, "F32" if cache.float32 else model.dtype)
        for layer in model.layers
        for mixer in layer.mixers
        for cache in mixer.caches()
        if isinstance(cache, StateBuffer)
    )
