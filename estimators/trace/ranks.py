"""One rank of several, built and recorded in one process: nothing is launched.

mlx-lm's own ``shard`` and ``pipeline`` get a stand-in for the group; the collectives become
operations that no other rank answers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memfit.estimators.base.ranks import Parallel, Rank, pick_parallel
from memfit.estimators.trace.kernel_stubs import one_node
from memfit.estimators.trace.libraries import PrivateLibrary, changed


class StandInGroup:
    """What ``shard``, ``pipeline`` and the layers ask of an mx.distributed.Group."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank.index

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._rank.size


@contextmanager
def as_rank(library: PrivateLibrary, rank: Rank | None) -> Iterator[None]:
    """Make the collectives of the library those of a rank inside the block."""
    if rank is None:
        yield
        return
    with changed(library.core, _collectives(rank)):
        yield


def parallel_of(model: Any, requested: Parallel | None) -> Parallel:
    """Return how mlx-lm's sharded_load (utils.py) runs a model, as ``requested`` if it is.

    Raises:
        UnsupportedError: when the class has no method for it.
    """
    can: list[Parallel] = []
    if hasattr(model, "shard"):
        can.append("tensor")
    if hasattr(getattr(model, "model", None), "pipeline"):
        can.append("pipeline")
    return pick_parallel(requested, can)


def share(model: Any, rank: Rank | None) -> None:
    """Leave in a loaded model what one rank has of it, as mlx-lm's sharded_load does.

    Raises:
        UnsupportedError: when the class has no method for it.
    """
    if rank is None:
        return
    group = StandInGroup(rank)
    if parallel_of(model, rank.parallel) == "tensor":
        model.shard(group)
    else:
        # Not every class takes a split (kimi_k3.py).
        model.model.pipeline(group, **({"split": list(rank.split)} if rank.split else {}))


def _collectives(rank: Rank) -> Mapping[str, Callable[..., Any]]:
    """Return mlx.core.distributed as the rank's process has it."""
    import mlx.core as mx

    def same(name: str) -> Callable[..., Any]:
        return lambda x, *_, **__: one_node(name, [x], [x])[0]

    def all_gather(x: Any, *_: Any, **__: Any) -> Any:
        # mlx distributed/ops.cpp: as many times the first axis, a scalar becomes a row.
        first, *others = x.shape or (1,)
        like = mx.zeros((first * rank.size, *others), x.dtype)
        return one_node("AllGather", [x], [like])[0]

    def recv(shape: Any, dtype: Any, *_: Any, **__: Any) -> Any:
        return one_node("Recv", [], [mx.zeros(shape, dtype)])[0]

    return {
        "distributed.init": lambda *_, **__: StandInGroup(rank),
        "distributed.all_sum": same("AllReduce"),
        "distributed.all_max": same("AllReduce"),
        "distributed.all_gather": all_gather,
        "distributed.send": same("Send"),
        "distributed.recv": recv,
        "distributed.recv_like": lambda x, *_, **__: recv(x.shape, x.dtype),
    }
