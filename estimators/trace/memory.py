"""The allocator during a run: what is in use, and the freed buffers kept for the next request.

Sources: mlx/backend/common/buffer_cache.h (reuse), backend/{no_gpu,metal,cuda}/allocator.cpp.
"""

from bisect import bisect_left, insort

from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.kernels import KEPT_BYTES, allocated
from memfit.estimators.trace.layouts import Allocation

# The page, of which a reused buffer may waste two.
PAGE = {"cpu": 4096, "metal": 16384, "cuda": 16384}


class Allocator:
    """Bytes in use; ``clock`` is the index of the operation being run."""

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend
        self.active = self.peak = self.clock = self.peak_clock = 0
        self.held = 0
        """The most bytes in use and kept together, which the process holds."""
        self.operation = self.peak_operation = ""
        self.buffers: list[Allocation] = []
        self._page = PAGE[backend]
        self._limit = KEPT_BYTES[backend]
        self._free: list[int] = []
        self._free_bytes = 0

    def begin(self, operation: str) -> None:
        """Forget the highest moment and the buffers that are gone, before another call.

        What is there then is there while its first ``operation`` runs.
        """
        self.buffers = [buffer for buffer in self.buffers if buffer.died is None]
        self.clock += 1
        self.operation = self.peak_operation = operation
        self.peak, self.peak_clock = self.active, self.clock
        self.held = self.active + self._free_bytes

    def allocate(self, nbytes: int) -> Allocation:
        """Return a buffer of at least ``nbytes``, a freed one where one is near in size."""
        size = allocated(nbytes, self.backend)
        free = self._free
        # buffer_cache.h, reuse_from_cache: the smallest that fits, unless too much would be wasted.
        result = bisect_left(free, size)
        if result < len(free) and free[result] < min(2 * size, size + 2 * self._page):
            # All of a reused buffer is in use, also what the array does not need.
            size = free.pop(result)
            self._free_bytes -= size
        buffer = Allocation(size, self.operation, self.clock)
        self.buffers.append(buffer)
        self.active += size
        self.held = max(self.held, self.active + self._free_bytes)
        # Kept buffers are not counted: MLX's peak memory is the most active memory.
        if self.active > self.peak:
            self.peak, self.peak_clock = self.active, self.clock
            self.peak_operation = self.operation
        return buffer

    def take(self, buffer: Allocation) -> None:
        """Count a buffer that another run has left in use."""
        buffer.born = self.clock
        self.buffers.append(buffer)
        self.active += buffer.nbytes

    def release(self, buffer: Allocation) -> None:
        """Drop one reference; the last one frees the buffer."""
        buffer.references -= 1
        if buffer.references:
            return
        size = buffer.nbytes
        buffer.died = self.clock
        self.active -= size
        # The CPU's allocator keeps 32 MiB in all and frees the rest (no_gpu/allocator.cpp).
        if size and (self._limit is None or self._free_bytes + size <= self._limit):
            insort(self._free, size)
            self._free_bytes += size

    def clear_cache(self) -> None:
        """Give the freed buffers back, as mlx-lm does after each chunk of the prompt."""
        self._free.clear()
        self._free_bytes = 0
