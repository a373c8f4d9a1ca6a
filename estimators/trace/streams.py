"""How far MLX runs ahead of the device, and what that keeps alive.

Sources: mlx/transforms.cpp (MAX_ACTIVE_TASKS), backend/cpu/{encoder.h,eval.cpp},
backend/{metal,cuda}/device.cpp (needs_commit), backend/{metal,cuda}/eval.cpp.
"""

from collections import deque
from typing import Protocol

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduling import command_buffer_limits, graph_limits, scheduling
from memfit.estimators.trace.layouts import Buffer
from memfit.estimators.trace.memory import Memory
from memfit.estimators.trace.operation import Operation


class Ahead(Protocol):
    """Work given to the device and not done yet; it keeps buffers alive."""

    def after(self, op: Operation, held: list[Buffer], memory: Memory) -> None:
        """Give the device one operation, and wait if too much is under way."""

    def drain(self, memory: Memory) -> None:
        """Wait for all of it."""


class CpuTasks:
    """The CPU's stream: a task every ten dispatches, one empty dispatch after each operation.

    The stream is taken as slow: it has done what MLX waited for, and no more.
    """

    def __init__(self) -> None:
        constants = scheduling()
        self._per_task = constants.cpu_dispatches_per_task
        self._most = constants.max_active_tasks
        self._given = self._tasks_done = 0
        self._under_way: deque[tuple[int, list[Buffer]]] = deque()

    def after(self, op: Operation, held: list[Buffer], memory: Memory) -> None:
        """See `Ahead`."""
        # Dispatches without a kernel take no time: they are done with the kernel before them.
        done_with = self._given + op.kernels if op.kernels else 0
        self._given += op.kernels + 1
        self._under_way.append((done_with, held))
        if self._given // self._per_task - self._tasks_done > self._most:
            self._tasks_done += 1
            self._finish(self._tasks_done * self._per_task, memory)

    def drain(self, memory: Memory) -> None:
        """See `Ahead`."""
        self._tasks_done = self._given // self._per_task
        self._finish(self._given, memory)

    def _finish(self, dispatches: int, memory: Memory) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0] <= dispatches:
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
