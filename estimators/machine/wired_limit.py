"""The wired limit to set, and the system setting for it."""

from msgspec import Struct

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.working_set import DEFAULT_REGIME, GIB, stock_working_set

MEBIBYTE = 2**20
_SMALLEST_MAC = 8 * GIB
LEAST_LEFT_BYTES = _SMALLEST_MAC - stock_working_set(_SMALLEST_MAC, os_regime=DEFAULT_REGIME).bytes
"""What a limit must leave the system, 2.86 GB: the least that macOS itself leaves on any Mac, one
of 8 GB."""
# github.com/ml-explore/mlx/issues/3186, github.com/ml-explore/mlx-lm/issues/883 and 1666: macOS
# panics in IOGPUMemory.cpp on M1 to M4, with long prompts or several requests at a time, also with
# memory left; without a wired limit ten of ten runs of one reporter passed. The cause is not known.
RISK = (
    "macOS resets it at restart; with too little left the system slows down or hangs, and kernel"
    " panics are reported while MLX keeps memory wired (mlx issue 3186, mlx-lm issues 883, 1666)"
)
"""What to know before the setting is changed."""


class WiredLimit(Struct, frozen=True):
    """A limit for memory that MLX keeps resident."""

    nbytes: int
    sysctl_mebibytes: int | None
    """``iogpu.wired_limit_mb`` for all that is needed, None when the working set is enough."""
    left_for_system_bytes: int
    """Memory without the limit that is set by sysctl."""


def wired_limit(needed_bytes: int, device: Device) -> WiredLimit:
    """Return the limit for the bytes that must stay resident.

    It is at most the device's working set: MLX raises an error above it (allocator.cpp,
    set_wired_limit). A sysctl value is given for a need above the working set that leaves
    the system `LEAST_LEFT_BYTES`.
    """
    sysctl = None
    most = device.memory_bytes - LEAST_LEFT_BYTES
    if (
        device.working_set_bytes < needed_bytes
        and ceil_div(needed_bytes, MEBIBYTE) * MEBIBYTE <= most
    ):
        sysctl = ceil_div(needed_bytes, MEBIBYTE)
    limit = min(needed_bytes, device.working_set_bytes)
    return WiredLimit(limit, sysctl, device.memory_bytes - (sysctl or 0) * MEBIBYTE)
