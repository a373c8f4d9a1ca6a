"""What the operations of a run keep alive at once, by the queue of mlx/scheduler.py."""

from collections.abc import Iterable

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    BatchLimits,
    BatchQueue,
    command_buffer_limits,
    gpu_limits,
)
from memfit.estimators.workspace.tape import Step

_NO_LIMIT = 1 << 62


def formula_limits(device: Device) -> BatchLimits:
    """Return the limits the formula uses: CPU tasks as batches, CUDA as a large Metal GPU."""
    if device.backend == "cpu":
        return BatchLimits(CPU_DISPATCHES_PER_TASK - 1, _NO_LIMIT)
    return command_buffer_limits("s") if device.backend == "cuda" else gpu_limits(device)


def transient_peak(layers: Iterable[tuple[Step, ...]], limits: BatchLimits) -> int:
    """Return the most bytes alive at once beyond those alive at the start, 0 at least."""
    queue: BatchQueue[int] = BatchQueue(limits)
    submit = queue.submit
    alive = peak = 0
    for steps in layers:
        for allocated, released, dispatches, elements, repeated in steps:
            alive += allocated
            if alive > peak:
                peak = alive
            if repeated:
                in_batch = len(queue.open)
                for count, gap in repeated:
                    # Touched before, but in a batch that is already closed.
                    if gap > in_batch:
                        elements += count
            done = submit(released, dispatches, elements)
            if done:
                alive -= sum(done)
    return peak
