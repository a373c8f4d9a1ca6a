"""Tensors of a checkpoint in groups: a hundred thousand of experts become a few thousand."""

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from memfit.estimators.base import dtypes
from memfit.estimators.checkpoint.manifest import Tensor

EXPERTS = ".experts.*."
FLOATING = frozenset({"F16", "BF16", "F32"})
"""The types of floating numbers that MLX computes with."""


class TensorGroup(NamedTuple):
    """A tensor, or several that differ only in the number of their expert."""

    name: str
    """Its name; a star is in the place of the expert's number."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of one copy."""
    copies: int = 1
    """How many tensors there are in the group."""

    def as_type(self, dtype: str) -> "TensorGroup":
        """Return the group with elements of another type."""
        return self._replace(dtype=dtype, nbytes=dtypes.nbytes(prod(self.shape), dtype))


def tensor_groups(tensors: Iterable[Tensor]) -> tuple[TensorGroup, ...]:
    """Return the tensors in order, those of a layer's experts as one group.

    >>> experts = [Tensor(f"layer.experts.{index}.w1", "U8", (2,), 2) for index in range(3)]
    >>> tensor_groups(experts)
    (TensorGroup(name='layer.experts.*.w1', dtype='U8', shape=(2,), nbytes=2, copies=3),)
    """
    counts: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()
    for name, dtype, shape, nbytes in tensors:
        parent, found, rest = name.partition(".experts.")
        if found:
            index, _, place = rest.partition(".")
            # A stacked expert has no number, and is a tensor of its own.
            if index.isdecimal():
                name = f"{parent}{EXPERTS}{place}"
        counts[name, dtype, shape, nbytes] += 1
    return tuple(TensorGroup(*key, copies) for key, copies in counts.items())


def sizes(groups: Iterable[TensorGroup]) -> Counter[int]:
    """Return how many tensors there are of each size in bytes."""
    result: Counter[int] = Counter()
    for group in groups:
        result[group.nbytes] += group.copies
    return result
