"""What a library does to the arrays of files until a model is loaded, as one recorded call.

load_model (utils.py of mlx-lm and mlx-vlm) builds a graph: files are read, ``sanitize`` stacks,
splits and converts. mx.eval(model.parameters()) then runs all of it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from memfit.estimators.base.ranks import Rank
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.trace.graph_format import Call, Node
from memfit.estimators.trace.kernel_stubs import TraceTarget, recorded
from memfit.estimators.trace.leaves import Leaf, Modules
from memfit.estimators.trace.model_builder import arrays_of
from memfit.estimators.trace.ranks import share
from memfit.estimators.trace.recording import record_call
from memfit.estimators.trace.streams import READ


def record_load(
    load: Callable[[dict[str, Any]], Any], tensors: Iterable[Tensor], target: TraceTarget
) -> Call:
    """Return the load of a checkpoint by ``load``, from its arrays; call it inside `tracing`.

    Raises:
        GraphError: when the graph cannot be recorded.
    """
    arrays = arrays_of(tensors)

    def run() -> list[Any]:
        with recorded(target):
            model = load(arrays)
        return _parameters(model)

    leaves = [Leaf(array, "computed", name, arrays, name) for name, array in arrays.items()]
    return _load(run, leaves)


def record_share(model: Any, target: TraceTarget, rank: Rank) -> Call:
    """Return the load of a rank's part from files with the parameters of a whole ``model``.

    It is for a model without headers; the model is then the rank's. Call it inside `tracing`.

    Raises:
        GraphError: when the graph cannot be recorded.
    """

    def run() -> list[Any]:
        with recorded(target):
            share(model, rank)
        return _parameters(model)

    return _load(run, [leaf._replace(role="computed") for leaf in _weights(model)])


def _weights(model: Any) -> list[Leaf]:
    return [leaf for leaf in Modules(model).leaves() if leaf.role == "weight"]


def _parameters(model: Any) -> list[Any]:
    from mlx.utils import tree_flatten

    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def _load(run: Callable[[], list[Any]], leaves: list[Leaf]) -> Call:
    graph = record_call(run, leaves)
    made = {position for node in graph.nodes for position in node.outputs}
    # An array of a file is allocated when it is read.
    reads = tuple(
        Node(READ, (), (position,))
        for position, array in enumerate(graph.arrays)
        if array.role == "computed" and position not in made
    )
    return Call(
        # Nothing shows it among the calls of a run, so it needs no phase of its own.
        phase="first_chunk",
        tokens=0,
        position=0,
        arrays=graph.arrays,
        nodes=(*reads, *graph.nodes),
        evaluated=graph.outputs,
        held=tuple(dict.fromkeys(graph.outputs)),
    )
