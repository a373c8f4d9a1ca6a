"""Stops, or shortens, a call of a class that loops over tokens in Python.

Where a target has no kernel for a recurrence, mlx-lm's class runs it step by step, and the graph
of a chunk has tens of operations for each token in each layer. Every such loop slices its arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memfit.estimators.trace.isolation import array_stubs
from memfit.estimators.trace.libraries import PrivateLibrary, changed

# Without a loop a class takes about ten per layer, 63 where it scans chunks (Falcon-H1).
MAX_SLICES = 6_000


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


@contextmanager
def shortened(library: PrivateLibrary, tokens: int, iterations: int) -> Iterator[None]:
    """Run loops over ``tokens`` tokens for the first ``iterations`` only inside the block.

    All arrays outside of a loop keep their shapes: what the other tokens would add to its result is
    a scalar of zero, stretched.
    """

    def few(*limits: int) -> range:
        return range(iterations) if limits == (tokens,) else range(*limits)

    def whole(join: Callable[..., Any]) -> Callable[..., Any]:
        def joined(arrays: Sequence[Any], axis: int = 0) -> Any:
            import mlx.core as mx

            arrays = list(arrays)
            if len(arrays) != iterations:
                return join(arrays, axis)
            if join is mx.stack:
                arrays = [mx.expand_dims(array, axis) for array in arrays]
            shape = list(arrays[0].shape)
            shape[axis] *= tokens - iterations
            rest = mx.broadcast_to(mx.zeros((), arrays[0].dtype), shape)
            return mx.concatenate([*arrays, rest], axis)

        return joined

    core = library.core
    stubs = {name: whole(getattr(core, name)) for name in ("stack", "concatenate")}
    with library.builtin("range", few), changed(core, stubs):
        yield
