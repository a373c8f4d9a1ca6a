"""Functions of MLX with gradients that a recording can hold.

MLX exports neither what mx.checkpoint makes nor the gradient of a sorted gather_mm, and a kernel of
Python has no gradient. In a recording such a function is an expression that MLX can differentiate,
with marks in it; `resolved` then puts in its place the nodes that MLX evaluates.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memfit.estimators.trace.compiled_functions import depth_first, makers_of
from memfit.estimators.trace.graph_format import Array, Node
from memfit.estimators.trace.kernel_stubs import TraceTarget, map_arrays, one_node, recording_stubs

_CHECKPOINT = "memfit_checkpoint"
_GRADIENT = "memfit_gradient_"
_SAME, _SEGMENTED = "Copy", "SegmentedMM"
# By function, the node that computes its gradient on a GPU (mlx/fast.cpp).
_VJPS = {"fast.rms_norm": "RMSNormVJP", "fast.layer_norm": "LayerNormVJP", "fast.rope": "RoPE"}
# What is between a mark and a result of another shape.
_STRETCHES = frozenset({"AsType", "Broadcast", "ExpandDims", "Reduce", "Reshape", "Squeeze"})


def training_stubs(target: TraceTarget) -> dict[str, Any]:
    """Return what to replace in mlx.core while a training step is recorded for ``target``."""
    import mlx.core as mx

    stubs = recording_stubs(target)
    # MLX fuses no attention in training (metal/scaled_dot_product_attention.cpp, use_fallback).
    # What export merges, mx.compile merges too.
    for name in ("fast.scaled_dot_product_attention", "zeros", "ones"):
        stubs.pop(name, None)
    for name in _VJPS.keys() & stubs.keys():
        stubs[name] = _differentiable(_VJPS[name], stubs[name])
    if target.backend == "cpu":
        # It has no kernel of its own for a norm: MLX differentiates the operations.
        stubs = {name: stub for name, stub in stubs.items() if name not in _VJPS}
    return stubs | {
        "checkpoint": _checkpoint,
        "contiguous": _contiguous(stubs["contiguous"]),
        "gather_mm": _gather_mm(mx.gather_mm),
    }


def evaluated_checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mx.checkpoint where nothing is differentiated: results that hold the arguments."""

    def checkpointed(*args: Any, **named: Any) -> Any:
        import mlx.core as mx

        made = function(*args, **named)
        results = _arrays(made)
        # Its inputs end with the results (mlx/transforms.cpp, custom_function).
        passed = iter(one_node("CustomTransforms", [*_arrays((args, named)), *results], results))
        return map_arrays(made, lambda _: next(passed), mx.array)

    return checkpointed


def _checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mx.checkpoint: results that are computed again for their gradients.

    Source: mlx/transforms.cpp, checkpoint and custom_function.
    """

    def checkpointed(*args: Any, **named: Any) -> Any:
        import mlx.core as mx

        given = _arrays((args, named))
        made = function(*args, **named)
        results = list(map(mx.stop_gradient, _arrays(made)))
        again = iter(mx.depends(given, results))
        args, named = map_arrays((args, named), lambda _: next(again), mx.array)
        second = _arrays(function(*args, **named))
        mark = one_node(_CHECKPOINT, [results[0]], [mx.array([0])])
        # Cotangents go to the second results; `resolved` gives readers the first.
        passed = iter(mx.depends(second, [*mark, *map(mx.stop_gradient, given), *results]))
        return map_arrays(made, lambda _: next(passed), mx.array)

    return checkpointed


def _arrays(tree: Any) -> list[Any]:
    import mlx.core as mx

    arrays: list[Any] = []
    map_arrays(tree, arrays.append, mx.array)
    return arrays


def _differentiable(name: str, stub: Callable[..., Any]) -> Callable[..., Any]:
    def called(x: Any, *args: Any, **named: Any) -> Any:
        import mlx.core as mx

        # The weights of a norm come first, its other arguments are numbers.
        weights = [array for array in args if isinstance(array, mx.array)]
        x, *weights = operands = [array.astype(_type_of(x, weights)) for array in (x, *weights)]
        still = iter(map(mx.stop_gradient, weights))
        args = tuple(next(still) if isinstance(a, mx.array) else a for a in args)
        return _with_gradient(name, stub(mx.stop_gradient(x), *args, **named), operands)

    return called


def _type_of(x: Any, weights: Sequence[Any]) -> Any:
    import mlx.core as mx

    # ops.cpp, result_type: what adding scalars of these types gives.
    total = mx.zeros((), x.dtype)
    for weight in weights:
        total = total + mx.zeros((), weight.dtype)
    return total.dtype


def _contiguous(stub: Callable[..., Any]) -> Callable[..., Any]:
    def contiguous(array: Any, *args: Any, **named: Any) -> Any:
        import mlx.core as mx

        return _with_gradient(_SAME, stub(mx.stop_gradient(array), *args, **named), [array])

    return contiguous


def _gather_mm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return mx.gather_mm with its gradient for sorted indices, which MLX does not export."""

    def gather_mm(a: Any, b: Any, *args: Any, **named: Any) -> Any:
        import mlx.core as mx

        if not named.get("sorted_indices"):
            return original(a, b, *args, **named)
        out = original(a, mx.stop_gradient(b), *args, **named)
        return _with_gradient(_SEGMENTED, out, [b.astype(out.dtype)])

    return gather_mm


def _with_gradient(name: str, out: Any, operands: Sequence[Any]) -> Any:
    """Return ``out`` with gradients for ``operands``; it was computed without those."""
    import mlx.core as mx

    linked = out
    for index, operand in enumerate(operands):
        [mark] = one_node(f"{_GRADIENT}{name}_{index}", [mx.stop_gradient(out)], [operand])
        # In a gradient the mark is the first factor (mlx/primitives.cpp, Multiply::vjp).
        term = mx.multiply(operand, mark)
        linked = linked + (term if operand.shape == out.shape else term.sum())
    return linked


def resolved(
    nodes: Sequence[Node], outputs: Sequence[int], arrays: list[Array]
) -> tuple[list[Node], list[int]]:
    """Return the nodes that MLX evaluates, depth first from ``outputs``, and these.

    New arrays are appended to ``arrays``.
    """
    marks = _GradientMarks(nodes, arrays)
    made = [each for node in nodes for each in marks.resolve(node)]
    renamed = [
        marks.merged(node._replace(inputs=tuple(map(marks.first, node.inputs)))) for node in made
    ]
    ends = list(map(marks.first, outputs))
    return depth_first(makers_of(renamed), ends), ends


class _GradientMarks:
    """The marks of a recording, and what they stand for."""

    def __init__(self, nodes: Sequence[Node], arrays: list[Array]) -> None:
        self._arrays = arrays
        self._makers = {output: node for node in nodes for output in node.outputs}
        self._same: dict[int, int] = {}
        self._known: dict[Any, int] = {}
        self._results: dict[tuple[int, ...], tuple[int, ...]] = {}
        # By the array that they are the gradients of: the operands in their order.
        self._gradients: defaultdict[int, dict[int, Node]] = defaultdict(dict)
        for node in nodes:
            if node.name == "Depends" and (read := self._checkpointed(node)):
                self._results[read] = node.outputs
            elif node.name == "Multiply" and (mark := self._mark(node.inputs[0])):
                index = int(mark.name.rpartition("_")[2])
                self._gradients[mark.inputs[0]][index] = node

    def first(self, array: int) -> int:
        """Return what is read in place of an array."""
        while array in self._same:
            array = self._same[array]
        return array

    def merged(self, node: Node) -> Node:
        """Return a node; what equals it from now on is read in its place.

        MLX merges equal operations three times at most (compile.cpp, compile_simplify), which the
        marks of a checkpoint use up in the recording.
        """
        if self._results and node.inputs and len(node.outputs) == 1:
            [output] = node.outputs
            first = self._known.setdefault((node.name, node.inputs, node.arguments), output)
            if first != output:
                self._same[output] = first
        return node

    def resolve(self, node: Node) -> Iterable[Node]:
        """Return what takes the place of a node."""
        if node.name == "Depends":
            yield self._depends(node)
        elif node.name == "Add" and self._is_term(node.inputs[1]):
            self._same[node.outputs[0]] = node.inputs[0]
        elif node.name == "Multiply" and (mark := self._mark(node.inputs[0])):
            if operands := self._gradients.pop(mark.inputs[0], None):
                yield from self._gradient(mark, operands)
        else:
            yield node

    def _checkpointed(self, node: Node) -> tuple[int, ...] | None:
        count = len(node.outputs)
        mark = self._makers.get(node.inputs[count]) if len(node.inputs) > count else None
        return node.inputs[count + 1 :] if mark and mark.name == _CHECKPOINT else None

    def _depends(self, node: Node) -> Node:
        if read := self._checkpointed(node):
            return Node("CustomTransforms", read, node.outputs)
        # What is computed again waits for the results of the primitive.
        if outputs := self._results.get(node.inputs):
            return node._replace(inputs=(*node.inputs[: -len(outputs)], *outputs))
        return node

    def _mark(self, array: int) -> Node | None:
        maker = self._makers.get(array)
        return maker if maker and maker.name.startswith(_GRADIENT) else None

    def _is_term(self, array: int) -> bool:
        """Whether an array is what `_with_gradient` adds to a result."""
        maker = self._makers.get(array)
        while maker and maker.name in _STRETCHES:
            maker = self._makers.get(maker.inputs[0])
        return bool(maker and maker.name == "Multiply" and self._mark(maker.inputs[1]))

    def _gradient(self, mark: Node, operands: Mapping[int, Node]) -> Iterable[Node]:
        [out] = mark.inputs
        name = mark.name.removeprefix(_GRADIENT).rpartition("_")[0]
        read = self._makers[out].inputs
        cotangent = self._cotangent(next(iter(operands.values())).inputs[1], out)
        if name == _SEGMENTED:
            return self._segmented(read, cotangent, operands[0].outputs[0])
        if not name.endswith("VJP"):
            return [Node(name, (cotangent, *read[1:]), operands[0].outputs)]
        gradients = tuple(
            operands[index].outputs[0] if index in operands else self._new(self._arrays[array])
            for index, array in enumerate(read)
        )
        return [Node(name, (*read, cotangent), gradients)]

    def _cotangent(self, array: int, out: int) -> int:
        # For an operand of another shape it is summed, and broadcast again.
        while self._arrays[array].shape != self._arrays[out].shape:
            array = self._makers[array].inputs[0]
        return array

    def _segmented(self, read: Sequence[int], cotangent: int, gradient: int) -> Iterable[Node]:
        """Source: mlx/primitives.cpp, gather_mm_grad; the segments are too small to matter."""
        rows, columns = (self._flat(array) for array in (cotangent, read[0]))
        experts, inner, outer = self._arrays[gradient].shape
        turned = self._new(self._arrays[rows]._replace(shape=self._arrays[rows].shape[::-1]))
        product = self._new(self._arrays[gradient]._replace(shape=(experts, outer, inner)))
        return [
            Node("Flatten", (cotangent,), (rows,)),
            Node("Flatten", (read[0],), (columns,)),
            Node("Transpose", (rows,), (turned,), ((1, 0),)),
            Node(_SEGMENTED, (turned, columns, read[3]), (product,)),
            Node("Transpose", (product,), (gradient,), ((0, 2, 1),)),
        ]

    def _flat(self, array: int) -> int:
        like = self._arrays[array]
        return self._new(like._replace(shape=(like.size // like.shape[-1], like.shape[-1])))

    def _new(self, like: Array) -> int:
        self._arrays.append(Array(like.shape, like.dtype))
        return len(self._arrays) - 1
