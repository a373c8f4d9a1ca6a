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


class LoopError(Exception):
    """A call takes more slices than a class without a loop over tokens does."""


@contextmanager
def few_slices() -> Iterator[None]:
    """Raise `LoopError` once more than ``MAX_SLICES`` are taken of arrays inside the block."""
    import mlx.core as mx

    take = mx.array.__getitem__
    taken = 0

    def counted(array: Any, index: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > MAX_SLICES:
            # Raised inside the class, before the graph takes much time and memory.
            raise LoopError
        return take(array, index)

    with array_stubs({"__getitem__": counted}):
        yield
