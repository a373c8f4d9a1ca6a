"""The processes that run one model together, each with a part of it."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.setting_names import setting

Parallel = Literal["tensor", "pipeline"]
# mlx-lm runs one rank on a machine; more machines than this are no setup that anybody has.
MAX_RANKS = 64


class Rank(Struct, frozen=True):
    """One process of several."""

    index: int
    """Its number, from 0, as ``mlx.launch`` gives it."""
    size: int
    """How many there are."""
    parallel: Parallel
    split: tuple[int, ...] | None = None
    """In a pipeline, the layers of each rank; None: as the class splits them."""

    def layers(self, count: int) -> tuple[int, int]:
        """Return the first layer of a pipeline's rank and the end, of ``count`` layers in all.

        Source: mlx-lm models/pipeline.py: rank 0 has the last layers, and low ranks one more.

        >>> Rank(0, 3, "pipeline").layers(7), Rank(2, 3, "pipeline").layers(7)
        ((4, 7), (0, 2))
        """
        split = self.split or even_split(count, self.size)
        start = sum(split[self.index + 1 :])
        return start, start + split[self.index]

    @property
    def receives(self) -> bool:
        """Whether another rank has layers before those of this one."""
        return self.parallel == "pipeline" and self.index < self.size - 1

    @property
    def sends(self) -> bool:
        """Whether another rank has layers after those of this one."""
        return self.parallel == "pipeline" and self.index > 0


def pick_parallel(requested: Parallel | None, can: Sequence[Parallel]) -> Parallel:
    """Return how a class that ``can`` run so is run: without a request as by mlx-lm's sharded_load.

    Raises:
        UnsupportedError: when it cannot.
    """
    if not can:
        raise UnsupportedError("mlx-lm's class has neither shard nor pipeline: it runs on one rank")
    if requested is not None and requested not in can:
        method = "shard" if requested == "tensor" else "pipeline"
        raise UnsupportedError(
            f"mlx-lm's class has no {method}; it runs with {setting('parallel')} {can[0]}"
        )
    return requested or can[0]


def even_split(layers: int, size: int) -> tuple[int, ...]:
    """Return the layers of each rank; low ranks get one more (mlx-lm models/pipeline.py).

    >>> even_split(7, 3)
    (3, 2, 2)
    """
    base, extra = divmod(layers, size)
    return tuple(base + (rank < extra) for rank in range(size))


def check_split(split: tuple[int, ...], size: int, layers: int) -> None:
    """Check the layers of each rank.

    Raises:
        InputError: when they are not those of ``size`` ranks, or not all layers.
    """
    given = f"{setting('split')} {','.join(map(str, split))[:60]}"
    if len(split) != size:
        raise InputError(f"{given}: {len(split)} numbers for {size} ranks")
    if min(split) < 1:
        raise InputError(f"{given}: every rank needs a layer")
    if sum(split) != layers:
        raise InputError(f"{given}: the sum is {sum(split)}, the model has {layers} layers")
