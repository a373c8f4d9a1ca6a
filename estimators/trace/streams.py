"""The device's queue of recorded operations, and the buffers it keeps alive."""

from collections.abc import Callable, Iterable

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduler import BatchQueue, ReadQueue, TaskQueue, WorkQueue, gpu_limits
from memfit.estimators.trace.layouts import Allocation
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import Operation

# The primitive that reads an array from a file, on the CPU in any case (mlx io/load.cpp).
READ = "Load"


class Stream:
    """The operations given to one device; each keeps its buffers until the device has run it."""

    def __init__(self, device: Device, *, after_others: bool = False) -> None:
        # The CPU closes tasks by dispatches alone, so its elements are not used.
        self._queue: WorkQueue[list[Allocation]] = TaskQueue(after_others=after_others)
        self._reads: ReadQueue[list[Allocation]] | None = None
        self._elements: Callable[[Operation], int] = _read
        self._touched: Touched | None = None
        self.largest_batch = 0
        """The most bytes that were free when one batch of work had run."""
        if device.backend != "cpu":
            # Without reads it is a queue of batches alone.
            self._queue = self._reads = batches = ReadQueue[list[Allocation]](gpu_limits(device))
            if device.backend == "metal":
                self._touched = Touched(batches)
                self._elements = self._touched.count

    def after(self, op: Operation, held: list[Allocation], memory: Allocator) -> None:
        """Give the device one operation, and wait if too much is under way."""
        if self._reads and op.name == READ:
            _release(self._reads.read(), memory)
            return
        # Without a kernel nothing is encoded, and no buffer is bound to the batch.
        self.submit(held, op.kernels, self._elements(op) if op.kernels else 0, memory)

    def submit(
        self, held: list[Allocation], kernels: int, elements: int, memory: Allocator
    ) -> None:
        """Give the device kernels that touch ``elements`` that their batch has not touched."""
        done = self._queue.submit(held, kernels, elements)
        if done:
            active = memory.active
            _release(done, memory)
            self.largest_batch = max(self.largest_batch, active - memory.active)

    def touched(self) -> set[int]:
        """Return the identities of buffers that do not count again in the open batch."""
        return self._touched.buffers() if self._touched else set()

    def drain(self, memory: Allocator) -> None:
        _release(self._queue.drain(), memory)


def _read(op: Operation) -> int:
    """CUDA counts an input whenever it is read (backend/cuda/device.cpp, set_input_array)."""
    return sum(view.data_size for view in op.inputs if view.buffer is not None)


class Touched:
    """Metal counts a buffer once in a batch (backend/metal/device.cpp, register_*_array)."""

    def __init__(self, batches: BatchQueue[list[Allocation]]) -> None:
        self._batches = batches
        self._batch = 0
        self._buffers: set[int] = set()

    def count(self, op: Operation) -> int:
        touched, fresh = self.buffers(), op.temporary_elements
        # set_output_array calls set_input_array, so outputs count too.
        for view in (*op.inputs, *op.outputs):
            # A scalar that mx.compile broadcasts inside a kernel is not an array of the device.
            if view.buffer is not None and id(view.buffer) not in touched:
                touched.add(id(view.buffer))
                fresh += view.data_size
        return fresh

    def buffers(self) -> set[int]:
        """Return the identities of the buffers that the open batch has touched."""
        # A new command buffer has no inputs yet.
        if self._batch != self._batches.closed_batches:
            self._batch = self._batches.closed_batches
            self._buffers.clear()
        return self._buffers


def _release(done: Iterable[list[Allocation]], memory: Allocator) -> None:
    for held in done:
        for buffer in held:
            memory.release(buffer)
