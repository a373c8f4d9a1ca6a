"""What ends a run on MLX though its bytes fit: mlx/data/run_limits.py has the rows and sources."""

from collections.abc import Iterable, Iterator
from typing import Any

from memfit.estimators.arch.model import Model
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import chips
from memfit.estimators.machine.device import GIB, Device
from memfit.estimators.mlx.data.run_limits import BUFFER_COUNT, GPU_WATCHDOG
from memfit.estimators.mlx.kv_cache import buffer_counts
from memfit.estimators.mlx.versions import format_version
from memfit.estimators.results.estimate import Limit, Note
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.facets import MlxLmPrograms, OnMlx
from memfit.estimators.runtimes.held import held_limit, is_shared
from memfit.estimators.runtimes.interface import MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.source import Measured
from memfit.estimators.sizing.sized_model import SizedModel, held_of, peak_of


def run_limits(
    sized: SizedModel, workload: Workload, *, serving: bool = False
) -> tuple[Limit, ...]:
    """Return the limits of a run that are not of bytes, where they apply, each with its figure.

    One run does not meet what ends only a batch, as mlx_lm.server makes of every request: it is
    ``serving`` then, and what is held is the server's (`ServerBound.held_bytes`). None but that
    applies to a run that was measured: it went through.
    """
    runtime_model, device = sized.runtime_model, sized.device
    if not (runtime_model.facet(OnMlx) and runtime_model.subject.backend == "metal"):
        return ()
    held: Iterator[Limit] = iter(())
    if device and is_shared(device) and not serving:
        held = held_limit(peak_of(sized, workload), held_of(sized, workload), device)
    if isinstance(runtime_model.source, Measured):
        return tuple(held)
    return (
        *held,
        *_gpu_watchdog(runtime_model, workload),
        *_buffer_count(runtime_model, workload, in_batches=serving or workload.batch > 1),
    )


def largest_buffer(device: Device | None, figures: MemoryFigures) -> Iterator[Limit]:
    """Yield the limit on one allocation, where the device is known to have one."""
    if device is None or device.max_buffer_bytes is None:
        return
    figure = figures.moment.largest_buffer_bytes
    yield Limit(
        name="largest_buffer",
        unit="bytes",
        figure=figure,
        limit=device.max_buffer_bytes,
        verdict="exceeds" if figure > device.max_buffer_bytes else "fits",
        beyond="exceeds",
        reason="Metal gives no larger buffer, and the run ends",
        source=("MTLDevice.maxBufferLength, as in `memfit devices`",),
    )


def tightened(verdict: Verdict, limits: Iterable[Limit]) -> Verdict:
    """Return the verdict of the bytes, tight where a limit may end a run that fits."""
    may_end = any(limit.verdict == "tight" for limit in limits)
    return "tight" if verdict == "fits" and may_end else verdict


def prompt_verdict(sized: SizedModel, workload: Workload, tokens: int) -> Verdict:
    """Return ``tight`` for a prompt that fits by its bytes and that something else may end."""
    return tightened("fits", run_limits(sized, workload.prompt_only(tokens)))


def ending_notes(limits: Iterable[Limit], *, of: str = "") -> Iterator[Note]:
    """Yield a warning for each limit that may end the run; ``of`` says of what the run is."""
    for limit in limits:
        if limit.verdict in ("tight", "unknown"):
            text = f"{of}{limit.reason}; {limit.remedy}" if limit.remedy else f"{of}{limit.reason}"
            yield Note("warning", limit.name.replace("_", "-"), text)


def notes_beyond(sized: SizedModel, workload: Workload, tokens: int) -> Iterator[Note]:
    """Yield the warnings of a longer prompt that the workload's own limits do not say."""
    said = {limit.name for limit in run_limits(sized, workload) if limit.verdict != "fits"}
    longer = run_limits(sized, workload.prompt_only(tokens))
    yield from ending_notes(
        limit for limit in longer if limit.beyond == "tight" and limit.name not in said
    )


def _gpu_watchdog(runtime_model: RuntimeModel, workload: Workload) -> Iterator[Limit]:
    """The longest prefill call by its keys, on the GPUs that were seen to be interrupted."""
    device = runtime_model.subject.device
    buffers = buffer_counts(runtime_model.subject.model, workload.max_kv_size)
    keys = max((buffer.held_tokens(workload.prompt_tokens) for buffer in buffers), default=0)
    row = _watchdog_row(device) if device and keys else None
    if device is None or row is None:
        return
    beyond: Verdict = "unknown" if device.generation is None else row["beyond"]
    yield Limit(
        name="gpu_watchdog",
        unit="tokens",
        figure=keys,
        limit=row["keys"],
        verdict=beyond if keys > row["keys"] else "fits",
        beyond=beyond,
        reason=row["reason"],
        remedy=row["remedy"],
        source=row["source"],
    )


def _watchdog_row(device: Device) -> dict[str, Any] | None:
    """The row of a GPU; of a Mac of unknown chip the strictest that it may be sold with."""
    return next((row for row in GPU_WATCHDOG if _may_be(device, row["generations"])), None)


def _may_be(device: Device, generations: tuple[int, ...]) -> bool:
    """Whether a GPU is of these generations, or a Mac of unknown chip was sold with one of them."""
    if device.generation is not None:
        return device.generation in generations
    sold = (chip for chip in chips().values() if chip.generation in generations)
    return device.memory_bytes <= max(max(chip.memory_gib) for chip in sold) * GIB


def _buffer_count(
    runtime_model: RuntimeModel, workload: Workload, *, in_batches: bool
) -> Iterator[Limit]:
    """The tokens that mlx_lm.server generates before leaked buffers end it."""
    most = server_generates(runtime_model, workload)
    if most is not None:
        last = format_version(BUFFER_COUNT["last_mlx_lm"])
        beyond: Verdict = "tight" if in_batches else "unknown"
        yield Limit(
            name="buffer_count",
            unit="tokens",
            figure=workload.max_tokens,
            limit=most,
            verdict=beyond if workload.max_tokens > most else "fits",
            beyond=beyond,
            reason=(
                f"under mlx_lm.server up to {last} it ends after about {most} generated tokens, by"
                " leaked buffers"
            ),
            remedy="mlx_lm.generate leaks none; in the server requests add up until none is open",
            source=BUFFER_COUNT["source"],
        )


def training_buffers(parameters: int, lengths: int, constants: int) -> Limit:
    """Return the limit of a training that keeps ``constants`` buffers for each of its lengths.

    mx.compile keeps the constants of a step's graph for each shape that it was called with.
    """
    most = int(BUFFER_COUNT["buffers"])
    figure = parameters + int(BUFFER_COUNT["of_a_run"]) + lengths * constants
    return Limit(
        name="buffer_count",
        unit="buffers",
        figure=figure,
        limit=most,
        verdict="tight" if figure > BUFFER_COUNT["warned"] else "fits",
        beyond="tight",
        reason=(
            f"compiled steps keep {constants} buffers for each of {lengths} lengths of batches, and"
            f" Metal gives no more than {most}"
        ),
        remedy="a shorter --max-seq-length has fewer lengths",
        source=BUFFER_COUNT["training_source"],
    )


def server_generates(runtime_model: RuntimeModel, workload: Workload) -> int | None:
    """Return the tokens that mlx_lm.server can generate of a batch, None: it leaks no buffers.

    Rounded, and without the buffers of the weights, some hundreds to thousands: "about".
    """
    leaked = _leaked_each_token(runtime_model, workload)
    return (2 * int(BUFFER_COUNT["buffers"]) + leaked) // (2 * leaked) if leaked else None


def server_buffers(runtime_model: RuntimeModel, workload: Workload) -> int | None:
    """Return the buffers of Metal when mlx_lm.server has generated a batch, None for others.

    Those of the weights, of a run, and what leaks with each token.
    """
    if not (runtime_model.facet(MlxLmPrograms) and runtime_model.subject.backend == "metal"):
        return None
    leaked = _leaked_each_token(runtime_model, workload) * workload.max_tokens
    tensors = runtime_model.subject.footprint.sizes.total()
    return tensors + int(BUFFER_COUNT["of_a_run"]) + leaked


def _leaked_each_token(runtime_model: RuntimeModel, workload: Workload) -> int:
    leaking = _leaking_layers(runtime_model.subject.model)
    # KV bits switch batching off (server.py, _is_batchable), and the server rotates no cache.
    batches = workload.kv_bits is None and workload.max_kv_size is None
    is_leaking = runtime_model.runtime.versions.mlx_lm <= BUFFER_COUNT["last_mlx_lm"]
    is_served = batches and bool(runtime_model.facet(MlxLmPrograms))
    return leaking if is_leaking and is_served else 0


def _leaking_layers(model: Model) -> int:
    """The layers that leak a buffer a token: of the recurrent ones all but one."""
    recurrent = sum(any(mixer.states() for mixer in layer.mixers) for layer in model.layers)
    attending = sum(any(mixer.kv_buffers() for mixer in layer.mixers) for layer in model.layers)
    leaking = max(0, recurrent - 1) if model.model_type in BUFFER_COUNT["recurrent"] else 0
    return leaking + (attending if model.model_type in BUFFER_COUNT["attention"] else 0)
