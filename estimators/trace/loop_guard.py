"""Stops a call of a class that loops over tokens in Python.

Where a target has no kernel for a recurrence, mlx-lm's class runs it step by step, and the graph
of a chunk has tens of operations for each token in each layer. Every such loop slices its arrays.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.estimators.trace.isolation import array_stubs

# Without a loop a class takes about ten per layer, 63 where it scans chunks (Falcon-H1).
MAX_SLICES = 6_000
# Of a training step, which has no other way: about 10 s and 600 MB.
MAX_TRAINED_SLICES = 40_000


class LoopError(Exception):
    """A call takes more slices than a class without a loop over tokens does."""


@contextmanager
def few_slices(most: int = MAX_SLICES) -> Iterator[None]:
    """Raise `LoopError` once more than ``most`` slices are taken of arrays inside the block."""
    import mlx.core as mx

    take, iterate = mx.array.__getitem__, mx.array.__iter__
    taken = 0

    def count(slices: int) -> None:
        nonlocal taken
        taken += slices
        if taken > most:
            # Raised inside the class, before the graph takes much time and memory.
            raise LoopError

    def taking(array: Any, index: Any) -> Any:
        count(1)
        return take(array, index)

    def iterating(array: Any) -> Any:
        count(len(array))
        return iterate(array)

    with array_stubs({"__getitem__": taking, "__iter__": iterating}):
        yield
