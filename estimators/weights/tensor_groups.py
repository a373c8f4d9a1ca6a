"""Tensors of a checkpoint, the experts' taken together: a hundred thousand are a few thousand."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from memfit.estimators.checkpoint.manifest import Tensor

EXPERTS = ".experts.*."


class Kind(NamedTuple):
    """A tensor, or ``copies`` of one that differ in the expert's number, a star in ``name``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # of one copy
    copies: int = 1


def kinds(tensors: Iterable[Tensor]) -> tuple[Kind, ...]:
    """Return the tensors in order, those of a layer's experts as one kind.

    >>> experts = [Tensor(f"layer.experts.{index}.w1", "U8", (2,), 2) for index in range(3)]
    >>> kinds(experts)
    (Kind(name='layer.experts.*.w1', dtype='U8', shape=(2,), nbytes=2, copies=3),)
    """
    counts: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()
    for name, dtype, shape, nbytes in tensors:
        parent, found, rest = name.partition(".experts.")
        if found:
            index, _, place = rest.partition(".")
            if index.isdecimal():
                name = f"{parent}{EXPERTS}{place}"
        counts[name, dtype, shape, nbytes] += 1
    return tuple(Kind(*key, copies) for key, copies in counts.items())


def sizes(kinds: Iterable[Kind]) -> Counter[int]:
    """Return how many tensors there are of each size in bytes."""
    result: Counter[int] = Counter()
    for kind in kinds:
        result[kind.nbytes] += kind.copies
    return result
