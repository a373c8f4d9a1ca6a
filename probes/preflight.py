"""Check that a run fits this machine, before anything is loaded."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import MachineError, UnsupportedError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device, free_bytes
from memfit.estimators.runtimes.budget import Need
from memfit.estimators.sizing.recommend import recommend_here
from memfit.estimators.sizing.sized_model import SizedModel

MEMORY_LIMIT = "memory limit"


class RefusedError(MachineError):
    """This machine has too little memory for the run; the caller can force it."""


class Obstacle(Struct, frozen=True):
    """Why a workload cannot run here."""

    reason: str
    needed_bytes: int | None = None
    """None when the reason is not memory."""
    free_bytes: int | None = None

    def __str__(self) -> str:
        return self.reason


def obstacle(sized: SizedModel, workload: Workload, units: Units = Units.GB) -> Obstacle | None:
    """Return why a workload cannot run here now by the estimate, None when it can.

    Peak and margin must fit the free memory and the working set. The largest allocation must not
    exceed the device's maximum.
    """
    try:
        need = sized.requirement(workload)
    except UnsupportedError as error:
        return Obstacle(str(error))
    return memory_obstacle(need, sized.device, units) if sized.device else None


def require_room(sized: SizedModel, workload: Workload, units: Units = Units.GB) -> None:
    """Require that a workload fits; the error says what is missing and what would fit.

    Raises:
        UnsupportedError: when the runtime cannot run the workload at all.
        RefusedError: when there is too little memory for it.
    """
    sized.figures_for(workload)
    found = obstacle(sized, workload, units)
    if found:
        would_fit = " or ".join(_would_fit(sized, workload))
        remedy = f"{would_fit} would fit" if would_fit else "no setting makes it fit"
        raise RefusedError(f"{sized.checkpoint.id}: {found}; {remedy}")


def limited(device: Device, memory_limit_bytes: int | None) -> Device:
    """Return the device with its working set cut to a memory limit, if one is given."""
    if memory_limit_bytes is None or memory_limit_bytes >= device.working_set_bytes:
        return device
    return replace(device, working_set_bytes=memory_limit_bytes, budget=MEMORY_LIMIT)


def memory_obstacle(need: Need, device: Device, units: Units) -> Obstacle | None:
    """Return why a need does not fit a device now, None when it does."""
    free, largest = free_bytes(device), device.max_buffer_bytes
    peak = f"estimated to need {format_bytes(need.peak_bytes, units)}"
    if need.peak_bytes > free:
        text = (
            f"{peak}, and {format_bytes(free, units)} of"
            f" {format_bytes(device.memory_bytes, units)} are free"
        )
        return Obstacle(text, need.peak_bytes, free)
    if need.peak_bytes > device.working_set_bytes:
        budget = format_bytes(device.working_set_bytes, units)
        text = f"{peak}, above the {device.budget} of {budget}"
        return Obstacle(text, need.peak_bytes, device.working_set_bytes)
    if largest is not None and need.largest_buffer_bytes > largest:
        text = (
            f"estimated to need one allocation of {format_bytes(need.largest_buffer_bytes, units)},"
            f" above {format_bytes(largest, units)}, the largest that the device allows"
        )
        return Obstacle(text, need.largest_buffer_bytes, largest)
    return None


def _would_fit(sized: SizedModel, workload: Workload) -> Iterator[str]:
    searching, device = sized.formula_view(), sized.device
    if device is None:
        return
    room = min(device.working_set_bytes, free_bytes(device))
    here = searching.on(replace(device, working_set_bytes=room))
    advice = recommend_here(here, workload)
    if advice.context_tokens.state == "change":
        yield f"a prompt of {advice.context_tokens.value} tokens"
    if advice.prefill_step.state == "change":
        yield f"a prefill step of {advice.prefill_step.value}"
    if advice.kv_bits.state == "change":
        yield f"a KV cache of {advice.kv_bits.value} bits"
