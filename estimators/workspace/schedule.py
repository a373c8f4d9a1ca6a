"""What the operations of a run keep alive at once, by the queue of mlx/scheduler.py."""

from collections.abc import Iterable, Sequence

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    BatchLimits,
    BatchQueue,
    gpu_limits,
)
from memfit.estimators.workspace.tape import Program, Step

_NO_LIMIT = 1 << 62
LEAST_SIMULATED = 8
"""Layers followed up to the last of each kind: these or more, as many as can be in flight."""


def formula_limits(device: Device) -> BatchLimits:
    """Return the limits the formula uses: those of a GPU, and CPU tasks as batches."""
    if device.backend == "cpu":
        # A batch closes with MORE than its limit, a task with exactly its number of dispatches.
        return BatchLimits(CPU_DISPATCHES_PER_TASK - 1, _NO_LIMIT)
    return gpu_limits(device)


def transient_peak(layers: Iterable[tuple[Step, ...]], limits: BatchLimits) -> int:
    """Return the most bytes alive at once beyond those alive at the start, 0 at least."""
    queue: BatchQueue[int] = BatchQueue(limits)
    # Local names: this loop runs for each operation of each estimate.
    submit, batch = queue.submit, queue.open
    alive = peak = 0
    for steps in layers:
        for allocated, released, dispatches, elements, repeated, longest_ago in steps:
            alive += allocated
            if alive > peak:
                peak = alive
            if longest_ago > len(batch):
                # Touched before, but in a batch that is already closed.
                in_batch = len(batch)
                # A batch counts each buffer once (mlx backend/metal/device.cpp, set_input_array).
                elements += sum([count for count, ago in repeated if ago > in_batch])
            done = submit(released, dispatches, elements)
            if done:
                # A buffer whose last use is recorded is free only after its batch has run.
                alive -= sum(done)
    return peak


def layers_in_flight(programs: Sequence[Program], limits: BatchLimits) -> int:
    """Return how many layers can be in flight together: the cheapest ones, in every batch."""
    # Closed batches that have not run, and the open one.
    batches = limits.in_flight + 1
    dispatches = min(sum(step.dispatches for step in p.steps) for p in programs)
    elements = min(sum(step.elements for step in p.steps) for p in programs)
    by_dispatches = ceil_div(batches * (limits.max_ops + 1), max(1, dispatches))
    by_elements = ceil_div(batches * (limits.max_mebi_elements + 1) << 20, max(1, elements))
    return max(LEAST_SIMULATED, min(by_dispatches, by_elements))


def simulated_layers(order: Sequence[int], window: int) -> list[int]:
    """Return the layers that represent all: ``window`` of them up to the last of each kind."""
    # Everything before the last layer of a kind has its caches as they are after the call.
    last = {number: index for index, number in enumerate(order)}
    ends = {*last.values(), len(order) - 1}
    return sorted({i for end in ends for i in range(max(0, end - window + 1), end + 1)})
