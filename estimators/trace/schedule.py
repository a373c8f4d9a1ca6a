"""The order in which MLX evaluates a graph, and how far it runs ahead of the device.

Sources: mlx/transforms.cpp (eval_impl: the tape, MAX_ACTIVE_TASKS), backend/cpu/encoder.h,
backend/metal/device.cpp (needs_commit), utils.h (bfs_max_width).
"""

from collections import deque
from typing import Protocol

from memfit.estimators.machine.scheduling import scheduling
from memfit.estimators.trace.buffers import Operation
from memfit.estimators.trace.layouts import Buffer
from memfit.estimators.trace.memory import Memory
from memfit.estimators.trace.nodes import Call

# MLX_BFS_MAX_WIDTH in mlx/utils.h.
WIDTH = 20


def evaluation_order(call: Call) -> list[int]:
    """Return the positions of the nodes in the order they are evaluated.

    The tape is filled from the results down, breadth first until ``WIDTH`` arrays wait, and read
    from its end. An array is put on it at its last use; outputs of one node count as one.
    """
    maker: dict[int, int] = {}
    for position, node in enumerate(call.nodes):
        for out in node.outputs:
            maker[out] = position
    uses = _uses(call, maker)
    tape: list[int] = []
    waiting: list[tuple[tuple[int, ...], int]] = []
    head = -1
    while head < len(tape) or waiting:
        start = 0
        if head >= len(tape):
            inputs, start = waiting.pop()
        else:
            inputs = call.evaluated if head < 0 else call.nodes[tape[head]].inputs
            head += 1
        for index in range(start, len(inputs)):
            node = maker.get(inputs[index])
            if node is None:
                continue
            if len(tape) - head >= WIDTH:
                waiting.append((inputs, index))
                break
            uses[node] -= 1
            if not uses[node]:
                tape.append(node)
    tape.reverse()
    return tape


def _uses(call: Call, maker: dict[int, int]) -> dict[int, int]:
    """Return how often each node that the results need is used."""
    uses: dict[int, int] = {}
    stack = [call.evaluated]
    while stack:
        for array in stack.pop():
            node = maker.get(array)
            if node is None:
                continue
            if node in uses:
                uses[node] += 1
            else:
                uses[node] = 1
                stack.append(call.nodes[node].inputs)
    return uses


class Ahead(Protocol):
    """Work given to the device and not done yet; it keeps buffers alive."""

    def after(self, op: Operation, held: list[Buffer], memory: Memory) -> None:
        """Give the device one operation, and wait if too much is under way."""

    def drain(self, memory: Memory) -> None:
        """Wait for all of it."""


# Nanoseconds an element takes on one core, or a multiplication of a matrix product: coarse, since
# they only decide what is done while MLX prepares an operation or wakes from waiting.
_SLOW = {
    **dict.fromkeys("Sigmoid Exp Softmax Tanh Erf Log Log1p Cos Sin Power LogSumExp".split(), 20.0),
    **dict.fromkeys("ArgSort ArgPartition Sort Partition".split(), 50.0),
    "Select": 5.0,
    "Reduce": 2.0,
}
_PER_PRODUCT = {
    "Matmul": 0.7,
    "AddMM": 0.7,
    "GatherMM": 0.7,
    "QuantizedMatmul": 2.0,
    "GatherQMM": 2.0,
}
_PREPARE = 1000.0
_WAKE = 20000.0


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
        self._device = max(self._device, self._host) + (_duration(op) if op.kernels else 100.0)
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
            for buffer in under_way.popleft()[1]:
                memory.release(buffer)


def _duration(op: Operation) -> float:
    out = op.outputs[0]
    per_product = _PER_PRODUCT.get(op.name)
    if per_product is not None:
        return out.size * op.inputs[0].shape[-1] * per_product
    return max(out.size, op.inputs[0].data_size if op.inputs else 0) * _SLOW.get(op.name, 1.0)
