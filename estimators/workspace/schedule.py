"""What the operations of a run keep alive at once, by the queue of mlx/scheduler.py."""

from collections.abc import Iterable, Sequence
from itertools import chain

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    MAX_ACTIVE_TASKS,
    BatchLimits,
    BatchQueue,
    QueueState,
    TaskQueue,
    gpu_limits,
)
from memfit.estimators.workspace.tape import Program, Step

LEAST_SIMULATED = 8
"""Layers followed up to the last of each kind: these or more, as many as can be in flight."""

# Steps from which on the state of a queue is compared.
_LONG_LAYER = 100


def formula_limits(device: Device) -> BatchLimits | None:
    """Return the limits of a GPU's batches, None for the CPU, which has tasks."""
    return None if device.backend == "cpu" else gpu_limits(device)


def transient_peak(layers: Iterable[tuple[Step, ...]], limits: BatchLimits | None) -> int:
    """Return the most bytes alive at once beyond those alive at the start, 0 at least."""
    if limits is None:
        return _peak_of_tasks(layers)
    queue: BatchQueue[int] = BatchQueue(limits)
    # Local names: this loop runs for each operation of each estimate.
    submit, batch = queue.submit, queue.open
    total = most = 0
    # By layer: the state it was last followed from, the peak and what stays, and the state after.
    known: dict[int, tuple[QueueState[int], int, int, QueueState[int]]] = {}
    for steps in layers:
        # A loop over tokens mostly begins and ends in one state; few steps are followed sooner.
        state = queue.state if len(steps) >= _LONG_LAYER else None
        last = known.get(id(steps)) if state else None
        if last and last[0] == state:
            _, peak, alive, after = last
            queue.resume(after)
            most, total = max(most, total + peak), total + alive
            continue
        alive = peak = 0
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
                # After its last use is recorded, a buffer is free only once its batch has run.
                alive -= sum(done)
        if state:
            known[id(steps)] = state, peak, alive, queue.state
        most, total = max(most, total + peak), total + alive
    return most


def _peak_of_tasks(layers: Iterable[tuple[Step, ...]]) -> int:
    queue: TaskQueue[int] = TaskQueue()
    alive = peak = 0
    for step in chain.from_iterable(layers):
        alive += step.allocated
        peak = max(peak, alive)
        # The queue itself adds the empty task after each operation.
        alive -= sum(queue.submit(step.released, step.dispatches - 1, step.elements))
    return peak


def layers_in_flight(programs: Sequence[Program], limits: BatchLimits | None) -> int:
    """Return how many layers can be in flight together: the cheapest ones, in every batch."""
    dispatches = min(sum(step.dispatches for step in p.steps) for p in programs)
    if limits is None:
        tasks = (MAX_ACTIVE_TASKS + 1) * CPU_DISPATCHES_PER_TASK
        return max(LEAST_SIMULATED, ceil_div(tasks, max(1, dispatches)))
    # Closed batches that have not run, and the open one.
    batches = limits.in_flight + 1
    elements = min(sum(step.elements for step in p.steps) for p in programs)
    # The operation that closes a batch is in it.
    most = (limits.max_mebi_elements + 1 << 20) + max(s.elements for p in programs for s in p.steps)
    by_dispatches = ceil_div(batches * (limits.max_ops + 1), max(1, dispatches))
    by_elements = ceil_div(batches * most, max(1, elements))
    return max(LEAST_SIMULATED, min(by_dispatches, by_elements))


def simulated_layers(order: Sequence[int], window: int) -> list[int]:
    """Return the layers that represent all: ``window`` of them up to the last of each kind."""
    # Everything before the last layer of a kind has its caches as they are after the call.
    last = {number: index for index, number in enumerate(order)}
    ends = {*last.values(), len(order) - 1}
    return sorted({i for end in ends for i in range(max(0, end - window + 1), end + 1)})
