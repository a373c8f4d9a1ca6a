"""What a process on MLX holds beside what a run needs: freed buffers, kept for their next use.

macOS charges the process for them. Source: mlx/backend/metal/allocator.cpp and
backend/cuda/allocator.cpp, malloc: buffers that are kept are given back before an allocation that
would bring all that is held above a limit of MLX's own.
"""

from collections.abc import Iterator

from memfit.estimators.base.units import open_size
from memfit.estimators.machine.device import FREE_NOW, RESERVED, Device
from memfit.estimators.results.estimate import Limit, Note
from memfit.estimators.results.terms import PeakMoment

_SOURCE = (
    "mlx/backend/metal/allocator.cpp, malloc and clear_cache",
    "https://github.com/ml-explore/mlx/issues/3350",
)


def most_held_bytes(moment: PeakMoment, device: Device | None) -> int | None:
    """Return the most bytes in use and kept together, None where they are not known."""
    if moment.held_bytes is None:
        return None
    limit = _collected_above(device) if device else None
    held = moment.held_bytes if limit is None else min(moment.held_bytes, limit)
    return max(held, moment.nbytes)


def _collected_above(device: Device) -> int | None:
    """Return the bytes above which MLX gives kept buffers back, None where it has no such limit."""
    if device.backend == "cpu":
        return None
    if device.backend == "cuda":
        return device.memory_bytes * 95 // 100
    recommended = device.working_set_bytes
    if is_shared(device):
        # What is free now is not what macOS recommends.
        recommended = device.stock_working_set_bytes or device.memory_bytes
    return min(recommended, device.memory_bytes or recommended) * 95 // 100


def is_shared(device: Device) -> bool:
    """Whether other programs need a part of the machine's memory."""
    return device.budget in (FREE_NOW, RESERVED)


def held_limit(moment: PeakMoment, device: Device | None) -> Iterator[Limit]:
    """Yield what a process holds, on a machine that it shares: there the rest is others'."""
    held = most_held_bytes(moment, device)
    if device is None or held is None or not is_shared(device):
        return
    room = device.working_set_bytes - moment.nbytes
    yield Limit(
        name="held_memory",
        unit="bytes",
        figure=held,
        limit=device.working_set_bytes,
        verdict="tight" if held > device.working_set_bytes else "fits",
        beyond="tight",
        reason="MLX keeps freed buffers, with which the process holds more than others leave it",
        remedy=f"mx.set_cache_limit({room}) gives more of them back" if room > 0 else "",
        source=_SOURCE,
    )


def held_note(moment: PeakMoment, device: Device | None) -> Iterator[Note]:
    """Yield what a process holds beyond what it needs, and what makes it less."""
    held = most_held_bytes(moment, device)
    if held is None or held == moment.nbytes:
        return
    text = (
        f"the process holds up to {open_size(held)}: MLX keeps freed buffers for their next use,"
        f" {open_size(held - moment.nbytes)} beyond the peak, and gives them back when it needs the"
        " memory; mx.set_cache_limit(N) keeps at most N bytes of them, at the price of allocating"
        " again"
    )
    yield Note("info", "held", text)
