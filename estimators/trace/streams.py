"""How far MLX runs ahead of the device, and what that keeps alive.

Sources: mlx/transforms.cpp (MAX_ACTIVE_TASKS), backend/cpu/{encoder.h,eval.cpp},
backend/{metal,cuda}/device.cpp (needs_commit), backend/{metal,cuda}/eval.cpp.
"""

from collections import deque
from typing import Protocol

from memfit.estimators.machine.device import Device
from memfit.estimators.machine.scheduling import command_buffer_limits, graph_limits, scheduling
from memfit.estimators.trace.layouts import Buffer
from memfit.estimators.trace.memory import Memory
from memfit.estimators.trace.operation import Operation

# Nanoseconds, estimated on one machine: of an element, of one multiplication in a product, of
# preparing an operation, of waking from a wait. They decide only what the device has done while
# MLX goes on; docs/accuracy-trace.md says how little the peak hangs on them.
_PER_ELEMENT = {
    **dict.fromkeys(("Cos", "Erf", "Exp", "Log", "Log1p", "LogSumExp", "Power"), 20.0),
    **dict.fromkeys(("Sigmoid", "Sin", "Softmax", "Tanh"), 20.0),
    **dict.fromkeys(("ArgPartition", "ArgSort", "Partition", "Sort"), 50.0),
    "Reduce": 2.0,
    "Select": 5.0,
}
_PER_PRODUCT = {
    **dict.fromkeys(("AddMM", "GatherMM", "Matmul"), 0.7),
    **dict.fromkeys(("GatherQMM", "QuantizedMatmul"), 2.0),
}
_NO_WORK = 100.0
_PREPARE = 1000.0
_WAKE = 20000.0


class Ahead(Protocol):
    """Work given to the device and not done yet; it keeps buffers alive."""

    def after(self, op: Operation, held: list[Buffer], memory: Memory) -> None:
        """Give the device one operation, and wait if too much is under way."""

    def drain(self, memory: Memory) -> None:
        """Wait for all of it."""


class CpuTasks:
    """The CPU stream: a task every ten dispatches, one empty dispatch after each operation."""

    def __init__(self) -> None:
        constants = scheduling()
        self._per_task = constants.cpu_dispatches_per_task
        self._most = constants.max_active_tasks
        self._given = 0
        self._host = self._device = 0.0
        self._task_ends: deque[float] = deque()
        self._under_way: deque[tuple[float, list[Buffer]]] = deque()

    def after(self, op: Operation, held: list[Buffer], memory: Memory) -> None:
        """See `Ahead`."""
        before = self._given // self._per_task
        self._given += op.kernels + 1
        self._host += _PREPARE
        self._device = max(self._device, self._host) + _duration(op)
        self._under_way.append((self._device, held))
        ends = self._task_ends
        for _ in range(self._given // self._per_task - before):
            ends.append(self._device)
        while ends and ends[0] <= self._host:
            ends.popleft()
        if len(ends) > self._most:
            self._host = max(self._host, ends.popleft()) + _WAKE
        self._release(self._host, memory)

    def drain(self, memory: Memory) -> None:
        """See `Ahead`."""
        self._host = max(self._host, self._device)
        self._task_ends.clear()
        self._release(self._host, memory)

    def _release(self, now: float, memory: Memory) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            _release(under_way.popleft()[1], memory)


class CommandBuffers:
    """A GPU's batches of work: closed after so many kernels or elements, ten in flight at most.

    The GPU is taken as slow: a batch has run when MLX waits for it, not before. Metal counts the
    elements of each buffer once in a batch, CUDA those of each input whenever it is read.
    """

    def __init__(self, device: Device) -> None:
        self._counts_reads = device.backend == "cuda"
        limits = (
            graph_limits(device.generation)
            if device.backend == "cuda"
            else command_buffer_limits(device.gpu_class)
        )
        self._most_kernels, self._most_mebi = limits
        self._in_flight_most = scheduling().max_active_tasks
        self._open: list[Buffer] = []
        self._kernels = self._elements = 0
        self._touched: set[int] = set()
        self._in_flight: deque[list[Buffer]] = deque()

    def after(self, op: Operation, held: list[Buffer], memory: Memory) -> None:
        """See `Ahead`."""
        self._open += held
        if op.kernels:
            self._kernels += op.kernels
            self._elements += self._read(op) if self._counts_reads else self._touch(op)
        if self._kernels > self._most_kernels or self._elements >> 20 > self._most_mebi:
            self._close()
            if len(self._in_flight) > self._in_flight_most:
                _release(self._in_flight.popleft(), memory)

    def _read(self, op: Operation) -> int:
        return sum(view.data_size for view in op.inputs)

    def _touch(self, op: Operation) -> int:
        fresh = 0
        for view in (*op.inputs, *op.outputs):
            if id(view.buffer) not in self._touched:
                self._touched.add(id(view.buffer))
                fresh += view.data_size
        return fresh

    def _close(self) -> None:
        self._in_flight.append(self._open)
        self._open = []
        self._kernels = self._elements = 0
        self._touched.clear()

    def drain(self, memory: Memory) -> None:
        """See `Ahead`."""
        self._close()
        while self._in_flight:
            _release(self._in_flight.popleft(), memory)


def stream_of(device: Device) -> Ahead:
    """Return an empty stream of a device."""
    return CpuTasks() if device.backend == "cpu" else CommandBuffers(device)


def _release(buffers: list[Buffer], memory: Memory) -> None:
    for buffer in buffers:
        memory.release(buffer)


def _duration(op: Operation) -> float:
    if not op.kernels:
        return _NO_WORK
    out, source = op.outputs[0], op.inputs[0] if op.inputs else op.outputs[0]
    if op.name in _PER_PRODUCT:
        return out.size * source.shape[-1] * _PER_PRODUCT[op.name]
    return max(out.size, source.data_size) * _PER_ELEMENT.get(op.name, 1.0)
