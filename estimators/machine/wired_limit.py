"""The wired limit to set, and the system setting for it."""

from memfit.estimators.base.records import record
from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device

MEBIBYTE = 2**20


@record(frozen=True, slots=True)
class WiredLimit:
    """The limit, and the ``iogpu.wired_limit_mb`` it needs when the stock one is too small."""

    nbytes: int
    sysctl_mebibytes: int | None
    left_for_system_bytes: int


def wired_limit(needed_bytes: int, device: Device) -> WiredLimit:
    """Return the limit for what must stay resident.

    At most the device's working set: MLX raises above it (allocator.cpp, set_wired_limit). The
    sysctl value is given when the need is above the working set and below all memory.
    """
    sysctl = None
    if device.working_set_bytes < needed_bytes < device.memory_bytes:
        sysctl = ceil_div(needed_bytes, MEBIBYTE)
    limit = min(needed_bytes, device.working_set_bytes)
    return WiredLimit(limit, sysctl, device.memory_bytes - (sysctl or 0) * MEBIBYTE)
