"""How far MLX runs ahead of the device, which decides how many buffers are alive at once.

Work is given to the device in batches: command buffers on Metal, graphs on CUDA, tasks on the CPU.
A batch keeps the buffers of its operations alive until it has run, and evaluation waits for the
oldest one once more than ``MAX_ACTIVE_TASKS`` are under way. The device is taken as slow: it has
run what MLX waited for, and no more. Sources of the limits: mlx/data/scheduling.py.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from memfit.estimators.machine.device import Device, GpuClass
from memfit.estimators.mlx.data.scheduling import SCHEDULING

MAX_ACTIVE_TASKS: int = SCHEDULING["max_active_tasks"]
CPU_DISPATCHES_PER_TASK: int = SCHEDULING["cpu_dispatches_per_task"]
# Those of full tasks, and of one that is full but for a dispatch.
_MOST_UNDER_WAY = (MAX_ACTIVE_TASKS + 1) * CPU_DISPATCHES_PER_TASK - 1

Work = TypeVar("Work")
QueueState = tuple[int, int, list[Work], list[list[Work]]]


class BatchLimits(Struct, frozen=True):
    """What closes a batch: more than these kernels, or more than these elements."""

    max_ops: int
    max_mebi_elements: int
    """Elements of the arrays the batch touches, shifted right by 20."""
    in_flight: int = MAX_ACTIVE_TASKS
    """Closed batches that may be under way while more work is given."""


def command_buffer_limits(gpu_class: GpuClass | None) -> BatchLimits:
    """Return the limits of a Metal command buffer; None is a class MLX does not know.

    >>> command_buffer_limits("s")
    BatchLimits(max_ops=50, max_mebi_elements=50, in_flight=10)
    """
    return BatchLimits(**SCHEDULING["command_buffers"][gpu_class or "default"])


def gpu_limits(device: Device) -> BatchLimits:
    """Return the limits of a GPU's batches: of CUDA by compute capability, 90 for 9.0.

    >>> gpu_limits(Device("H100", "cuda", 0, 0, None, "flag", None, 90)).max_ops
    100
    """
    if device.backend != "cuda":
        return command_buffer_limits(device.gpu_class)
    table: Any = SCHEDULING["cuda_graphs"]
    return BatchLimits(**table.get(device.generation, table["default"]))


class WorkQueue(Protocol[Work]):
    """Operations given to a device that it has not run; ``Work`` is what each keeps alive."""

    def submit(self, work: Work, kernels: int, elements: int) -> Iterable[Work]:
        """Give the device one operation; return the work that it has run when MLX continues."""

    def drain(self) -> list[Work]:
        """Wait for the device; return everything it had not run."""


class BatchQueue(Generic[Work]):
    """Work in batches that are closed by `BatchLimits`, as GPUs get it.

    Source: mlx backend/metal/device.cpp and backend/cuda/device.cpp, needs_commit.
    """

    __slots__ = (
        *("_append", "_closed", "_elements", "_in_flight", "_kernels", "_max_ops"),
        *("_too_many_elements", "closed_batches", "open"),
    )

    def __init__(self, limits: BatchLimits) -> None:
        self._max_ops, self._in_flight = limits.max_ops, limits.in_flight
        self._too_many_elements = limits.max_mebi_elements + 1 << 20
        self._kernels = self._elements = 0
        self._closed: deque[list[Work]] = deque()
        self.open: list[Work] = []
        """The operations of the open batch, in their order; always the same list."""
        self._append = self.open.append
        self.closed_batches = 0

    def submit(self, work: Work, kernels: int, elements: int) -> Iterable[Work]:
        """See `WorkQueue`; ``elements`` are of arrays that the open batch has not touched yet."""
        self._append(work)
        self._kernels += kernels
        self._elements += elements
        if self._kernels <= self._max_ops and self._elements < self._too_many_elements:
            return ()
        self._close()
        return self._closed.popleft() if len(self._closed) > self._in_flight else ()

    @property
    def state(self) -> "QueueState[Work]":
        """What decides how it goes on: counts of the open batch, its work and that under way."""
        return self._kernels, self._elements, self.open[:], list(self._closed)

    def resume(self, state: "QueueState[Work]") -> None:
        """Go on from a state."""
        self._kernels, self._elements, self.open[:], closed = state
        self._closed = deque(closed)

    def drain(self) -> list[Work]:
        """See `WorkQueue`."""
        self._close()
        left = [work for batch in self._closed for work in batch]
        self._closed.clear()
        return left

    def _close(self) -> None:
        self._closed.append(self.open[:])
        self.open.clear()
        self.closed_batches += 1
        self._kernels = self._elements = 0


class TaskQueue(Generic[Work]):
    """Work as the CPU gets it: tasks of a fixed number of dispatches, wherever operations begin.

    The encoder dispatches an operation's kernels and one empty task after it. Source: mlx
    backend/cpu/encoder.h, backend/cpu/eval.cpp.
    """

    __slots__ = ("_after_others", "_dispatched", "_tasks_done", "_under_way")

    def __init__(self, *, after_others: bool = False) -> None:
        """Take whether others were run before: the first task may then be full at any dispatch."""
        self._after_others = after_others
        self._dispatched = self._tasks_done = 0
        self._under_way: deque[tuple[int, Work]] = deque()

    def submit(self, work: Work, kernels: int, elements: int) -> Iterable[Work]:
        """See `WorkQueue`; elements do not count here."""
        del elements
        # Dispatches without a kernel take no time: they are done with the kernel before them.
        done_with = self._dispatched + kernels if kernels else 0
        self._dispatched += kernels + 1
        if self._after_others:
            # As a bound: an operation's buffers are in its last dispatch, which has no kernel.
            self._under_way.append((self._dispatched, work))
            return self._run(self._dispatched - _MOST_UNDER_WAY)
        self._under_way.append((done_with, work))
        if self._dispatched // CPU_DISPATCHES_PER_TASK - self._tasks_done <= MAX_ACTIVE_TASKS:
            return ()
        self._tasks_done += 1
        return self._run(self._tasks_done * CPU_DISPATCHES_PER_TASK)

    def drain(self) -> list[Work]:
        """See `WorkQueue`."""
        self._tasks_done = self._dispatched // CPU_DISPATCHES_PER_TASK
        return self._run(self._dispatched)

    def _run(self, dispatches: int) -> list[Work]:
        under_way, done = self._under_way, []
        while under_way and under_way[0][0] <= dispatches:
            done.append(under_way.popleft()[1])
        return done


class ReadQueue(BatchQueue[Work]):
    """A GPU's batches while files are read, which the CPU does in tasks of its own.

    Both count as under way (mlx scheduler.h), and are taken as done in their order: the GPU waits
    for what it needs. Before MLX waits it commits the GPU's open batch (mlx transforms.cpp).
    """

    __slots__ = ("_reads",)

    def __init__(self, limits: BatchLimits) -> None:
        super().__init__(limits)
        self._reads = 0

    def read(self) -> Iterable[Work]:
        """Give the CPU one read; return the work that is done when MLX continues."""
        self._reads += 1
        if self._reads % CPU_DISPATCHES_PER_TASK:
            return ()
        self._close()
        return self._closed.popleft() if len(self._closed) > self._in_flight else ()
