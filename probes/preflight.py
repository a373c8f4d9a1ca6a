"""Check that a run fits this machine, before anything is loaded."""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device, free_bytes
from memfit.estimators.runtimes.runtime import Need
from memfit.estimators.sizing.recommend import recommend_here
from memfit.estimators.sizing.sized_model import SizedModel

MEMORY_LIMIT = "memory limit"


class RefusedError(MachineError):
    """This machine has too little memory for the run; the caller can force it."""


class TooLongError(InputError):
    """The prompt is longer than the model's own limit; the caller can force it."""


def require_loadable(checkpoint: Checkpoint) -> None:
    """Require a checkpoint that mlx-lm can load: a directory of safetensors files.

    Raises:
        UnsupportedError: for a GGUF file.
        InputError: for any other reference without weights.
    """
    if checkpoint.source == "gguf":
        raise UnsupportedError(
            f"{checkpoint.id}: mlx-lm does not load GGUF files; give a model converted by"
            " mlx_lm.convert"
        )
    if checkpoint.tensors is None:
        raise InputError(f"{checkpoint.id}: has no safetensors to load; give a model's directory")


def obstacle(sized: SizedModel, workload: Workload, units: Units = Units.GB) -> str | None:
    """Return why a workload cannot run here now by the estimate, None when it can.

    Peak and margin must fit the free memory and the working set. The largest allocation must not
    exceed the device's maximum.
    """
    try:
        need = sized.requirement(workload)
    except UnsupportedError as error:
        return str(error)
    return memory_obstacle(need, sized.device, units) if sized.device else None


def require_room(sized: SizedModel, workload: Workload, units: Units = Units.GB) -> None:
    """Require that a workload fits; the error says what is missing and what would fit.

    Raises:
        UnsupportedError: when the runtime cannot run the workload at all.
        RefusedError: when there is too little memory for it.
    """
    sized.figures_for(workload)
    if reason := obstacle(sized, workload, units):
        would_fit = " or ".join(_would_fit(sized, workload))
        remedy = f"{would_fit} would fit" if would_fit else "no setting makes it fit"
        raise RefusedError(f"{sized.checkpoint.id}: {reason}; {remedy}")


def require_within_limit(sized: SizedModel, workload: Workload, *, force: bool) -> None:
    """Require that a workload is not longer than the model's own limit.

    Raises:
        TooLongError: when it is, unless forced.
    """
    limit = sized.model.max_context
    if limit and workload.total_tokens > limit and not force:
        raise TooLongError(
            f"{sized.checkpoint.id}: {workload.total_tokens} tokens of prompt and generation are"
            f" more than the model's own limit of {limit}"
        )


def limited(device: Device, memory_limit_bytes: int | None) -> Device:
    """Return the device with its working set cut to a memory limit, if one is given."""
    if memory_limit_bytes is None or memory_limit_bytes >= device.working_set_bytes:
        return device
    return replace(device, working_set_bytes=memory_limit_bytes, budget=MEMORY_LIMIT)


def memory_obstacle(need: Need, device: Device, units: Units) -> str | None:
    """Return why a need does not fit a device now, None when it does."""
    free, budget, largest = free_bytes(device), device.working_set_bytes, device.max_buffer_bytes
    peak = f"estimated to need {format_bytes(need.peak_bytes, units)}"
    if need.peak_bytes > free:
        whole = format_limit(device.memory_bytes, units)
        return f"{peak}, and {format_limit(free, units)} of {whole} are free"
    if need.peak_bytes > budget:
        return f"{peak}, above the {device.budget} of {format_limit(budget, units)}"
    if largest is not None and need.largest_buffer_bytes > largest:
        return (
            f"estimated to need one allocation of {format_bytes(need.largest_buffer_bytes, units)},"
            f" above {format_limit(largest, units)}, the largest that the device allows"
        )
    return None


def require_memory(what: str, need: Need, device: Device, units: Units) -> None:
    """Require that a need fits a device now; ``what`` names what has it.

    Raises:
        RefusedError: when it does not.
    """
    if reason := memory_obstacle(need, device, units):
        raise RefusedError(f"{what}: {reason}")


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
