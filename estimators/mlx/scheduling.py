"""How MLX batches work before it waits, which decides how many buffers are alive at once."""

from typing import Any

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import GpuClass
from memfit.estimators.mlx.data.scheduling import SCHEDULING


@record(frozen=True, slots=True)
class Scheduling:
    """MLX's constants, the same on every machine; sources in mlx/data/scheduling.py."""

    max_active_tasks: int
    cpu_dispatches_per_task: int


def scheduling() -> Scheduling:
    """Return the constants of the MLX versions described."""
    return Scheduling(SCHEDULING["max_active_tasks"], SCHEDULING["cpu_dispatches_per_task"])


def command_buffer_limits(gpu_class: GpuClass | None) -> tuple[int, int]:
    """Return the dispatches and the Mi (2^20) elements a Metal command buffer is closed after.

    It is closed when either is exceeded, not reached: 51 dispatches or 51 Mi elements on a Max.
    None is a class MLX does not know.

    >>> command_buffer_limits("s")
    (50, 50)
    """
    limits: Any = SCHEDULING["command_buffers"][gpu_class or "default"]
    return limits["max_ops"], limits["max_mebi_elements"]


def graph_limits(compute_capability: int | None) -> tuple[int, int]:
    """Return the kernels and the Mi (2^20) elements a CUDA graph is launched after.

    The capability as in `Device`, 90 for 9.0; None is one nobody told.

    >>> graph_limits(90), graph_limits(89)
    ((100, 1000), (20, 100))
    """
    table: Any = SCHEDULING["cuda_graphs"]
    limits = table.get(compute_capability, table["default"])
    return limits["max_ops"], limits["max_mebi_elements"]


def compiled_copies(mlx_version: tuple[int, ...]) -> bool:
    """Whether a compiled function leaves its inputs alone, where it could write over them.

    >>> compiled_copies((0, 29, 2)), compiled_copies((0, 30, 1))
    (True, False)
    """
    span: Any = SCHEDULING["compiled_copies"]
    return bool(span["since"] <= mlx_version < span["until"])
