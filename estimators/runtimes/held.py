"""What a process on MLX holds beside what a run needs: freed buffers, kept for their next use.

macOS charges the process for them. Source: mlx/backend/metal/allocator.cpp and
backend/cuda/allocator.cpp, malloc: buffers that are kept are given back before an allocation that
would bring all that is held above a limit of MLX's own.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP
from memfit.estimators.base.units import ceil_div, open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import FREE_NOW, RESERVED, Device
from memfit.estimators.mlx.kernels import KEPT_BYTES
from memfit.estimators.results.estimate import Limit, Note
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.interface import MemoryFigures

_SOURCE = (
    "mlx/backend/metal/allocator.cpp, malloc and clear_cache",
    "https://github.com/ml-explore/mlx/issues/3350",
)


def most_held_bytes(peak_bytes: int, held_bytes: int | None, device: Device | None) -> int | None:
    """Return the most bytes in use and kept together, None where they are not known."""
    if held_bytes is None:
        return None
    limits = [held_bytes]
    if device and (collected := _collected_above(device)) is not None:
        limits.append(collected)
    if device and (kept := KEPT_BYTES[device.backend]) is not None:
        limits.append(peak_bytes + kept)
    return max(peak_bytes, min(limits))


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


def without_held(figures: MemoryFigures) -> MemoryFigures:
    """Return figures of a loop of which it is not known when it gives freed buffers back."""
    return replace(figures, moment=replace(figures.moment, held_bytes=None, held_phase=None))


def with_batch_held(figures: MemoryFigures, workload: Workload) -> MemoryFigures:
    """Return what a batch takes in mlx-lm's batch generator, with a bound of what is held.

    It clears after a chunk of prompts, else every 512 decode steps (generate.py, BatchGenerator).
    Until then it keeps what was replaced: the caches of the prompts, which split copies; a batch
    that others join; one that has grown, twice; and one that a group has left, for each group.
    """
    moment = figures.moment
    if moment.held_bytes is None:
        return figures
    groups = ceil_div(min(workload.batch, workload.most_decoding), workload.prefill_batch)
    growths = min(2, ceil_div(workload.max_tokens, STEP))
    copies = 2 * (1 + growths) + (groups > 1) * (2 + groups - 1)
    caches = figures.kv.nbytes + figures.ssm_bytes
    # Of several groups one is prefilled while another decodes.
    decode = moment.nbytes if groups > 1 or moment.decode_bytes is None else moment.decode_bytes
    held = max(moment.nbytes, decode + ceil_div(copies * caches, 2))
    if held <= moment.held_bytes:
        return figures
    return replace(figures, moment=replace(moment, held_bytes=held, held_phase="decode"))


def is_shared(device: Device) -> bool:
    """Whether other programs need a part of the machine's memory."""
    return device.budget in (FREE_NOW, RESERVED)


def held_limit(
    peak_bytes: int, held_bytes: int | None, device: Device, *, remedy: str = ""
) -> Iterator[Limit]:
    """Yield what a process holds, on a machine that it shares: there the rest is others'.

    Where that is not known, the figure is the peak, and the verdict says so.
    """
    if not is_shared(device):
        return
    room = device.working_set_bytes - peak_bytes
    reason = "MLX keeps freed buffers, with which the process holds more than others leave it"
    verdict: Verdict = "tight" if (held_bytes or 0) > device.working_set_bytes else "fits"
    if held_bytes is None:
        reason, verdict = (
            "the freed buffers that MLX keeps are not known here, nor counted",
            "unknown",
        )
    elif not remedy and room > 0:
        remedy = f"mx.set_cache_limit({room}) gives more of them back"
    yield Limit(
        name="held_memory",
        unit="bytes",
        figure=peak_bytes if held_bytes is None else held_bytes,
        limit=device.working_set_bytes,
        verdict=verdict,
        beyond="unknown" if held_bytes is None else "tight",
        reason=reason,
        remedy="" if held_bytes is None else remedy,
        source=_SOURCE,
    )


def held_note(peak_bytes: int, held_bytes: int | None) -> Iterator[Note]:
    """Yield what a process holds beyond what it needs, and what makes it less."""
    if held_bytes is None or held_bytes == peak_bytes:
        return
    text = (
        f"the process holds up to {open_size(held_bytes)}: MLX keeps freed buffers for their next"
        f" use, {open_size(held_bytes - peak_bytes)} beyond the peak, and gives them back when it"
        " needs the memory; mx.set_cache_limit(N) keeps at most N bytes of them, at the price of"
        " allocating again"
    )
    yield Note("info", "held", text)
