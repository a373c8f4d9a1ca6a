"""NVIDIA GPUs by memory."""

import re
from functools import cache

from msgspec import Struct

from memfit.estimators.machine.data.nvidia import GPUS, UNIFIED_GPUS


class GpuModel(Struct, frozen=True):
    """A GPU as sold; ``compute_capability`` has major and minor in one number, 89 for 8.9."""

    id: str
    name: str
    memory_bytes: int
    compute_capability: int
    unified_memory: bool
    bandwidth_bytes: int
    """Bytes a second that its memory can deliver."""


@cache
def gpu_models() -> dict[str, GpuModel]:
    """Return every GPU by its id, such as ``rtx-4090`` or ``h100-80``."""
    tables = (GPUS, 2**20), (UNIFIED_GPUS, 10**9)
    return {
        gpu_id: GpuModel(
            gpu_id, name, memory * unit, capability, rows is UNIFIED_GPUS, bandwidth * 10**6
        )
        for rows, unit in tables
        for gpu_id, (name, memory, capability, bandwidth) in rows.items()
    }


def cuda_working_set(memory_bytes: int) -> int:
    """Return what MLX's CUDA allocator lets itself use: 95 % of the GPU's memory.

    Source: mlx/backend/cuda/allocator.cpp, memory_limit_.
    """
    return memory_bytes * 95 // 100


def listed_gpu(reported_name: str) -> GpuModel | None:
    """Return the GPU that nvidia-smi prints under this name, None when it is not listed.

    >>> [listed_gpu(name).id for name in ("NVIDIA GeForce RTX 4090", "Tesla T4")]
    ['rtx-4090', 't4']
    """
    matches = [
        model
        for model in gpu_models().values()
        if re.search(rf"\b{re.escape(model.name)}\b", reported_name, re.IGNORECASE)
    ]
    return max(matches, key=lambda model: len(model.name), default=None)
