"""How MLX's allocators round one allocation.

Sources (mlx 0.32): backend/metal/allocator.cpp, backend/cuda/allocator.cpp,
backend/no_gpu/allocator.cpp.
"""

from memfit.estimators.base.units import round_up
from memfit.estimators.machine.device import Backend

PAGE = 16384
_CUDA_SMALLEST = 8


def allocated(nbytes: int, backend: Backend = "metal") -> int:
    """Return the bytes one allocation takes.

    >>> allocated(16384), allocated(16385), allocated(9, "cuda"), allocated(16385, "cpu")
    (16384, 32768, 16, 16385)
    """
    if backend == "cpu" or nbytes == 0:
        return nbytes
    if nbytes > PAGE:
        return round_up(nbytes, PAGE)
    if backend == "metal":
        return nbytes
    return max(_CUDA_SMALLEST, 1 << (nbytes - 1).bit_length())
