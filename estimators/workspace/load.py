"""What is in use while mlx-lm makes the arrays of a model out of those in files.

mx.eval(model.parameters()) reads every file's arrays and stacks or converts them (mlx-lm utils.py,
load_model). The arrays that it starts from are in use until the device has made the others.
"""

from collections.abc import Callable, Iterable, Sequence

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    MAX_ACTIVE_TASKS,
    ReadQueue,
    TaskQueue,
    WorkQueue,
    command_buffer_limits,
    gpu_limits,
)
from memfit.estimators.weights.loading import Conversion, CutArray

# Arrays that wait on MLX's tape (mlx utils.h, MLX_BFS_MAX_WIDTH): they are read, a view each, and
# copied before the first of them is done with.
_WIDTH = 20
# Tasks under way, and the open one; each read of a file is a dispatch (mlx common/load.cpp).
_DISPATCHES = (MAX_ACTIVE_TASKS + 1) * CPU_DISPATCHES_PER_TASK + 3 * _WIDTH
# As many batches of a large GPU, each closed above this many elements, of four bytes.
_LIMITS = command_buffer_limits("s")
_GPU_TEMPORARIES = (MAX_ACTIVE_TASKS + 1) * (_LIMITS.max_mebi_elements << 20) * 4


def cut_load(cut: Sequence[CutArray], device: Device) -> int:
    """Return the most bytes in use while a rank reads whole arrays and copies its part of each.

    MLX reads as many as wait on its tape, then copies these (mlx transforms.cpp, eval_impl).
    """
    is_gpu = device.backend != "cpu"
    batches = ReadQueue[int](gpu_limits(device)) if is_gpu else None
    queue: WorkQueue[int] = batches or TaskQueue[int]()
    active = most = 0
    for start in range(0, len(cut), _WIDTH):
        group = cut[start : start + _WIDTH]
        for array in group:
            active += allocated(array.read_bytes, device.backend)
            active -= sum(batches.read() if batches else queue.submit(0, 1, 0))
        copied = [array for array in group if array.kept_bytes < array.read_bytes]
        if not is_gpu:
            for _ in copied:
                active -= sum(queue.submit(0, 0, 0))
        most = max(most, active)
        for array in copied:
            active += allocated(array.kept_bytes, device.backend)
            most = max(most, active)
            whole = allocated(array.read_bytes, device.backend)
            active -= sum(queue.submit(whole, 1, 2 * array.kept_elements))
    return most


def load_extra(made: Iterable[Conversion], *, arrays: int, backend: Backend) -> int:
    """Return the most bytes in use beyond weights of ``arrays``: a bound by the largest of them.

    The GPU is taken as faster than the disk, so that reads are what is in flight.
    """
    made, on_cpu = tuple(made), backend == "cpu"
    held = dispatches = 0
    # More inputs than fit on the tape: those of all arrays on it are read before the first is made.
    stacks = sum(each.reads > _WIDTH for each in made)
    together = ceil_div(2 * _WIDTH * stacks, max(1, arrays))
    for count, each in enumerate(sorted(made, key=lambda each: each.nbytes, reverse=True)):
        if dispatches >= _DISPATCHES and (each.reads <= _WIDTH or count > together):
            break
        held += each.nbytes
        dispatches += each.reads * (1 + each.operations) if on_cpu else _on_gpu(each)
    return held + _temporaries(made, on_cpu=on_cpu)


def _on_gpu(each: Conversion) -> int:
    """Return the reads of a conversion and the batches it closes, which count as ten reads each."""
    # Elements of four bytes at most, read and written.
    closes = each.nbytes // 2 > _LIMITS.max_mebi_elements << 20
    return each.reads + CPU_DISPATCHES_PER_TASK * max(each.reads // _LIMITS.max_ops, closes)


def _temporaries(made: Iterable[Conversion], *, on_cpu: bool) -> int:
    """Return the most bytes of arrays on the way from those of files to those of the model."""
    largest = sorted(made, key=lambda each: each.temporary, reverse=True)
    # The last arrays on the tape go step by step together, once all others are made.
    together = _first(largest, lambda each: each.outputs, _WIDTH)
    if on_cpu:
        return max(together, _first(largest, lambda each: 1 + each.operations, _DISPATCHES))
    # Those before them are made one after another.
    total = sum(each.reads * each.temporary for each in largest)
    one = largest[0].temporary if largest else 0
    return min(total, max(together, one + _GPU_TEMPORARIES))


def _first(made: Iterable[Conversion], cost: Callable[[Conversion], int], room: int) -> int:
    """Return the bytes on the way of the first reads that take ``room``."""
    total = 0
    for each in made:
        at_once = min(each.reads, ceil_div(max(0, room), cost(each)))
        total += at_once * each.temporary
        room -= at_once * cost(each)
    return total
