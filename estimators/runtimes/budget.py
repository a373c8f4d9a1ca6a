"""Whether a peak fits a device, by the device's recommended working set."""

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Verdict

# mlx-lm warns when the weights alone exceed nine tenths of the working set
# (generate.py, wired_limit); the whole peak is held against the same share.
COMFORTABLE = (9, 10)


@record(frozen=True, slots=True)
class Need:
    """The bytes a run needs at its largest moment, margin included, and its largest array."""

    peak_bytes: int
    largest_buffer_bytes: int


def judge(need: Need, device: Device | None) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and the limits that are exceeded.

    Exactly at a limit is within it.
    """
    if device is None:
        return "unknown", ()
    exceeded = []
    if need.peak_bytes > device.working_set_bytes:
        exceeded.append("working_set")
    if device.max_buffer_bytes is not None and need.largest_buffer_bytes > device.max_buffer_bytes:
        exceeded.append("max_buffer")
    if exceeded:
        return "exceeds", tuple(exceeded)
    share, whole = COMFORTABLE
    tight = need.peak_bytes * whole > device.working_set_bytes * share
    return ("tight" if tight else "fits"), ()
