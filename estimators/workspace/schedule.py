"""How far MLX runs ahead of the device, and what that keeps alive.

Metal closes a command buffer after so many kernels or so many Mi elements of touched arrays
(mlx backend/metal/device.cpp, needs_commit) and keeps the arrays it used until it has run
(backend/metal/eval.cpp, eval). The CPU counts a task every ten dispatches (backend/cpu/encoder.h).
Either way evaluation waits once more than ten are in flight (transforms.cpp, MAX_ACTIVE_TASKS).
"""

from collections import deque
from collections.abc import Iterable

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduling import command_buffer_limits, scheduling
from memfit.estimators.workspace.tape import Step

NO_LIMIT = 1 << 62


@record(frozen=True, slots=True)
class BatchRule:
    """A batch of work is closed at ``dispatches``, or above ``mebi_elements``.

    ``in_flight`` closed batches may be waiting to run when the next array is allocated.
    """

    dispatches: int
    mebi_elements: int
    in_flight: int


def batch_rule(device: Device) -> BatchRule:
    """Return the rule of a device; CUDA, which nobody checked, is taken as a large Metal GPU."""
    constants = scheduling()
    if device.backend == "cpu":
        return BatchRule(constants.cpu_dispatches_per_task, NO_LIMIT, constants.max_active_tasks)
    gpu_class = "s" if device.backend == "cuda" else device.gpu_class
    max_ops, max_mebi = command_buffer_limits(gpu_class)
    return BatchRule(max_ops + 1, max_mebi, constants.max_active_tasks)


def highest(layers: Iterable[tuple[Step, ...]], rule: BatchRule) -> int:
    """Return the most bytes alive at once beyond those alive at the start, 0 at least."""
    alive = peak = pending = dispatched = elements = index = start = 0
    limit, mebi, in_flight = rule.dispatches, rule.mebi_elements, rule.in_flight
    flight: deque[int] = deque()
    for steps in layers:
        for allocated, released, dispatches, fresh, repeated in steps:
            alive += allocated
            if alive > peak:
                peak = alive
            pending += released
            dispatched += dispatches
            elements += fresh
            for count, gap in repeated:
                # Touched before, but in a batch that is already closed.
                if index - gap < start:
                    elements += count
            index += 1
            if dispatched >= limit or elements >> 20 > mebi:
                flight.append(pending)
                pending = dispatched = elements = 0
                start = index
                if len(flight) > in_flight:
                    alive -= flight.popleft()
    return peak
