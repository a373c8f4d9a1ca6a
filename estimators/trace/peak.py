"""Memory over a run of mlx-lm, by following each recorded call through MLX's allocator."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.estimators import dtypes
from memfit.estimators.trace.buffers import Operation, rule_of
from memfit.estimators.trace.layouts import Buffer, View
from memfit.estimators.trace.memory import Memory
from memfit.estimators.trace.nodes import Array, Call, Trace
from memfit.estimators.trace.schedule import Ahead, CpuTasks, evaluation_order


@dataclass(frozen=True, slots=True)
class Run:
    """One call simulated: bytes at its highest moment, those alive then, and after each operation.

    ``peak`` counts caches, inputs and what the call makes; weights are not in it.
    """

    call: Call
    peak: int
    operation: str
    largest: int
    alive: tuple[tuple[str, int], ...]
    curve: tuple[int, ...]


class Simulation:
    """The state that lasts from call to call."""

    def __init__(self) -> None:
        self.memory = Memory("cpu")
        self.ahead: Ahead = CpuTasks()
        self.carried: list[View] = []

    def run(self, call: Call) -> Run:
        """Follow one call; what it leaves in the caches is there for the next."""
        memory, ahead = self.memory, self.ahead
        memory.operation = "caches"
        memory.peak = memory.active
        memory.clock += 1
        memory.peak_clock = memory.clock
        start = len(memory.buffers)
        views = [View(a.shape, dtypes.BITS[a.dtype] // 8) for a in call.arrays]
        order = evaluation_order(call)
        self._place_inputs(call, views, start)
        for position in order:
            for index in call.nodes[position].inputs:
                views[index].references += 1
        for index in (*call.held, *call.evaluated):
            views[index].references += 1
        self._drop_given_up(call, views)
        op = Operation(memory)
        curve = []
        for position in order:
            node = call.nodes[position]
            memory.clock += 1
            memory.operation = node.name
            op.name = node.name
            op.arguments = node.arguments
            op.inputs = [views[i] for i in node.inputs]
            op.outputs = [views[i] for i in node.outputs]
            op.temporaries = []
            op.kernels = 0
            rule_of("cpu", node.name)(op)
            ahead.after(op, _held(op), memory)
            for view in op.inputs:
                _unuse(view, memory)
            for view in op.outputs:
                if not view.references:
                    _free(view, memory)
            curve.append(memory.active)
        for index in call.evaluated:
            _unuse(views[index], memory)
        self.carried = [views[i] for i in call.held]
        buffers = memory.buffers
        at = memory.peak_clock
        alive: Counter[str] = Counter()
        largest = 0
        for buffer in buffers:
            if buffer.born <= at and (buffer.died is None or buffer.died >= at):
                alive[buffer.operation] += buffer.nbytes
            largest = max(largest, buffer.nbytes)
        operation = next((b.operation for b in buffers if b.born == at), "")
        return Run(call, memory.peak, operation, largest, tuple(alive.most_common()), tuple(curve))

    def finish(self) -> None:
        """Wait for the device and give freed buffers back, as mlx-lm does after a chunk."""
        self.ahead.drain(self.memory)
        self.memory.clear_cache()
        self.memory.buffers = [b for b in self.memory.buffers if b.died is None]

    def _place_inputs(self, call: Call, views: list[View], start: int) -> None:
        carried = iter(self.carried)
        for view, array in zip(views, call.arrays, strict=True):
            if array.role == "cache":
                kept = next(carried, None)
                if kept is not None and kept.shape == view.shape and kept.itemsize == view.itemsize:
                    view.lie_like(kept)
                    view.buffer = kept.buffer
                    kept.buffer = None
                    continue
            if array.role != "computed":
                self._place(view, array)
        for kept in self.carried:
            if kept.buffer is not None:
                self.memory.release(kept.buffer)

    def _place(self, view: View, array: Array) -> None:
        memory = self.memory
        if array.role == "weight" or (array.role == "constant" and array.shape):
            view.references += 1  # held by the model
            view.buffer = Buffer(array.nbytes, "weight", 0)
            view.buffer.references = 1
            return
        view.buffer = memory.allocate(array.nbytes)
        view.buffer.references = 1
        if array.role == "tokens":
            view.references += 1

    def _drop_given_up(self, call: Call, views: list[View]) -> None:
        for view, array in zip(views, call.arrays, strict=True):
            if array.role in ("cache", "constant") and not view.references:
                _free(view, self.memory)


def _held(op: Operation) -> list[Buffer]:
    """Return the buffers the device keeps until it has run the operation, each once."""
    own = op.outputs[0].buffer
    held = {id(b): b for v in op.inputs if (b := v.buffer) is not None and b is not own}
    for view in op.outputs[1:]:
        if view.buffer is not None and view.buffer is not own:
            held[id(view.buffer)] = view.buffer
    for buffer in held.values():
        buffer.references += 1
    return [*held.values(), *op.temporaries]


def _unuse(view: View, memory: Memory) -> None:
    view.references -= 1
    if not view.references:
        _free(view, memory)


def _free(view: View, memory: Memory) -> None:
    if view.buffer is not None:
        memory.release(view.buffer)
        view.buffer = None
