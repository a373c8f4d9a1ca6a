"""What is in use while mlx-lm makes the arrays of a model out of those in files.

mx.eval(model.parameters()) reads every file's arrays and stacks or converts them (mlx-lm utils.py,
load_model). The arrays that it starts from are in use until the device has made the others.
"""

from collections.abc import Iterable, Sequence

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
# As many batches of a large GPU, each closed above so many elements, of four bytes.
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
    temporary = _temporaries(made, on_cpu=on_cpu)
    if not on_cpu:
        temporary = min(temporary, _GPU_TEMPORARIES)
    held = dispatches = 0
    # More inputs than fit on the tape: those of all arrays on it are read before the first is made.
    together = 2 * _WIDTH * len(made) // max(1, arrays)
    for count, each in enumerate(sorted(made, key=lambda each: each.nbytes, reverse=True)):
        if dispatches >= _DISPATCHES and (each.reads <= _WIDTH or count > together):
            break
        held += each.nbytes
        dispatches += each.reads * (1 + each.operations) if on_cpu else _on_gpu(each)
    return held + temporary


def _on_gpu(each: Conversion) -> int:
    """Return the reads of a conversion and the batches it closes, which count as ten reads each."""
    # Elements of four bytes at most, read and written.
    closes = each.nbytes // 2 > _LIMITS.max_mebi_elements << 20
    return each.reads + CPU_DISPATCHES_PER_TASK * max(each.reads // _LIMITS.max_ops, closes)


def _temporaries(made: Iterable[Conversion], *, on_cpu: bool) -> int:
    total = dispatches = 0
    for each in sorted(made, key=lambda each: each.temporary, reverse=True):
        for_one = 1 + (each.operations if on_cpu else 0)
        at_once = min(each.reads, ceil_div(max(0, _DISPATCHES - dispatches), for_one))
        total += at_once * each.temporary
        dispatches += at_once * for_one
    return total
