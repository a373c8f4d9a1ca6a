"""NVIDIA GPUs by memory."""

import re
from dataclasses import dataclass
from functools import cache

from memfit.estimators.machine.data.nvidia import GPUS


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU as sold; ``compute_capability`` has major and minor in one number, 89 for 8.9."""

    id: str
    name: str
    memory_bytes: int
    compute_capability: int
    unified_memory: bool


@cache
def gpu_models() -> dict[str, GpuModel]:
    """Return every GPU by its id, such as ``rtx-4090`` or ``h100-80``."""
    return {
        gpu_id: GpuModel(
            gpu_id,
            row["name"],
            row["memory_mib"] * 2**20 if "memory_mib" in row else row["memory_gb"] * 10**9,
            row["compute_capability"],
            unified_memory="memory_gb" in row,
        )
        for gpu_id, row in GPUS.items()
    }


def cuda_working_set(memory_bytes: int) -> int:
    """Return what MLX's CUDA allocator lets itself use: 95 % of the GPU's memory.

    Source: mlx/backend/cuda/allocator.cpp, memory_limit_.
    """
    return memory_bytes * 95 // 100


def compute_capability(reported_name: str) -> int | None:
    """Return the compute capability of a GPU by the name nvidia-smi prints, None when not listed.

    >>> compute_capability("NVIDIA GeForce RTX 4090"), compute_capability("Tesla T4")
    (89, 75)
    """
    matches = [
        model
        for model in gpu_models().values()
        if re.search(rf"\b{re.escape(model.name)}\b", reported_name, re.IGNORECASE)
    ]
    longest = max(matches, key=lambda model: len(model.name), default=None)
    return longest.compute_capability if longest else None
