"""The most memory of mlx_lm.convert: its arrays followed through MLX's allocator and streams.

mlx_lm.convert builds a graph of reads, casts and quantised matrices. save_model (mlx-lm utils.py)
then writes one shard after another: mx.save_safetensors makes each array of a shard contiguous,
evaluates all of them at once in the order of a C++ hash map, and keeps them until they are written
(mlx io/safetensors.cpp, save_safetensors). Sources and casts are freed as the device goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from memfit.estimators.base import dtypes
from memfit.estimators.machine.device import Device
from memfit.estimators.trace.buffers import rule_of
from memfit.estimators.trace.graph_format import Argument, Call, Node
from memfit.estimators.trace.layouts import Allocation, View
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import Operation
from memfit.estimators.trace.schedule import evaluation_order
from memfit.estimators.trace.streams import READ, Stream
from memfit.estimators.weights.derived import TensorGroup


class Parameter(NamedTuple):
    """A parameter of the loaded model, and the arrays that a conversion writes of it."""

    source: TensorGroup
    cast: TensorGroup
    """The same with the type that it is cast to."""
    written: tuple[TensorGroup, ...]
    """``cast`` itself, or the words, scales and biases of a packed matrix."""
    reads: int = 1
    """Arrays of files that it is stacked from."""
    temporary_bytes: int = 0
    """Bytes in use on the way from one array of files to that of the model, in addition."""


def conversion_peak(
    parameters: Mapping[str, Parameter], shards: Iterable[Sequence[str]], device: Device
) -> int:
    """Return the most bytes in use while the ``shards`` are written, one after another.

    A shard has the names of written arrays in the order in which they are evaluated;
    ``parameters`` has the parameter of each.
    """
    walk = _Walk(parameters, device)
    for shard in shards:
        walk.write(shard)
    return walk.peak


class _Walk:
    def __init__(self, parameters: Mapping[str, Parameter], device: Device) -> None:
        self._memory = Allocator(device.backend)
        self._stream = Stream(device)
        self._operation = Operation(self._memory)
        self._views: list[View] = []
        self._parameters = parameters
        self._written: dict[str, int] = {}
        """The position of each array, from the graph of its parameter until it is written."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return self._memory.peak

    def write(self, shard: Sequence[str]) -> None:
        """Evaluate the arrays of a shard, and free them when they are written."""
        nodes: list[Node] = []
        evaluated: list[int] = []
        for name in shard:
            # An array of the shard before may have been made together with this one.
            if name not in self._written:
                self._add(self._parameters[name], nodes)
            source = self._written[name]
            evaluated.append(self._node(nodes, "Contiguous", (source,), self._like(source)))
        call = Call("first_chunk", 0, 0, (), tuple(nodes), tuple(evaluated), ())
        for node in nodes:
            for position in node.inputs:
                self._views[position].references += 1
        for position in evaluated:
            self._views[position].references += 1
        for position in evaluation_order(call):
            self._evaluate(nodes[position])
        self._stream.drain(self._memory)
        for name, position in zip(shard, evaluated, strict=True):
            self._drop(self._views[position])
            self._drop(self._views[self._written.pop(name)])

    def _add(self, parameter: Parameter, nodes: list[Node]) -> None:
        """Append what makes all arrays of a parameter."""
        source, cast, written = parameter.source, parameter.cast, parameter.written
        made = self._loaded(parameter, nodes)
        if cast.dtype != source.dtype:
            made = self._node(nodes, "AsType", (made,), self._new(cast.shape, _width(cast)))
        outputs: tuple[int, ...] = (made,)
        if len(written) > 1:
            outputs = tuple(self._new(each.shape, _width(each)) for each in written)
            nodes.append(Node("Quantize", (made,), outputs))
        for each, position in zip(written, outputs, strict=True):
            # save_model's own dictionary holds it until its shard is written.
            self._views[position].references += 1
            self._written[each.name] = position

    def _loaded(self, parameter: Parameter, nodes: list[Node]) -> int:
        shape, itemsize = parameter.source.shape, _width(parameter.source)
        if parameter.reads == 1:
            return self._read(parameter, shape, itemsize, nodes)
        # mx.stack adds an axis to each and concatenates them (mlx ops.cpp, stack).
        one = (1, *shape[1:])
        parts = [self._read(parameter, one, itemsize, nodes) for _ in range(parameter.reads)]
        if self._memory.backend == "cpu":
            # On a GPU nothing is dispatched for it.
            parts = [
                self._node(nodes, "ExpandDims", (part,), self._new(one, itemsize), ((0,),))
                for part in parts
            ]
        return self._node(nodes, "Concatenate", tuple(parts), self._new(shape, itemsize))

    def _read(
        self, parameter: Parameter, shape: tuple[int, ...], itemsize: int, nodes: list[Node]
    ) -> int:
        if not parameter.temporary_bytes:
            return self._node(nodes, READ, (), self._new(shape, itemsize))
        # All that is there on the way as one array, which is read and then replaced.
        read = self._node(nodes, READ, (), self._new((parameter.temporary_bytes,), 1))
        return self._node(nodes, "Gather", (read,), self._new(shape, itemsize))

    def _new(self, shape: tuple[int, ...], itemsize: int) -> int:
        self._views.append(View(shape, itemsize))
        return len(self._views) - 1

    def _like(self, position: int) -> int:
        view = self._views[position]
        return self._new(view.shape, view.itemsize)

    @staticmethod
    def _node(
        nodes: list[Node],
        name: str,
        inputs: tuple[int, ...],
        output: int,
        arguments: tuple[Argument, ...] = (),
    ) -> int:
        nodes.append(Node(name, inputs, (output,), arguments))
        return output

    def _evaluate(self, node: Node) -> None:
        memory, op = self._memory, self._operation
        memory.clock += 1
        memory.operation = op.name = node.name
        op.arguments = node.arguments
        op.inputs = [self._views[position] for position in node.inputs]
        op.outputs = [self._views[position] for position in node.outputs]
        op.temporaries, op.temporary_elements, op.kernels = [], 0, 0
        rule_of(memory.backend, node.name)(op)
        self._stream.after(op, _kept_by_device(op), memory)
        for view in op.inputs:
            self._drop(view)

    def _drop(self, view: View) -> None:
        view.references -= 1
        if not view.references and view.buffer is not None:
            self._memory.release(view.buffer)
            view.buffer = None


def _width(group: TensorGroup) -> int:
    """Return the bytes of an element."""
    return dtypes.BITS[group.dtype] // 8


def _kept_by_device(op: Operation) -> list[Allocation]:
    """Return the buffers that live until the device has run the operation, with one user more.

    These are inputs and further outputs (mlx backend/metal/eval.cpp, backend/cpu/eval.cpp).
    """
    own = op.outputs[0].buffer
    views = (*op.inputs, *op.outputs[1:])
    kept = {id(b): b for view in views if (b := view.buffer) is not None and b is not own}
    for buffer in kept.values():
        buffer.references += 1
    return [*kept.values(), *op.temporaries]
