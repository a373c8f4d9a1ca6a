"""``memfit tune``: a model loaded and run beside its estimate.

    tune(Request(model=..., checkpoint=..., workload=...), start=..., sweeps=user_sweeps())

Nothing is loaded before the estimate says that there is room for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.host import detect_host
from memfit.estimators.results.estimate import Note, Recommendation, Verdict
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import device_summary, model_summary, workload_notes
from memfit.estimators.sizing.peak_fit import ShortPrompt, calibration
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes import vision_estimate as picture
from memfit.probes.bench import REPEATS, Bench
from memfit.probes.command_lines import command_lines, recommended_workload
from memfit.probes.measured_recommendation import advise, by_measurement, line_of
from memfit.probes.preflight import MEMORY_LIMIT, limited, obstacle, require_room
from memfit.probes.process import ModelProcess, Prompt
from memfit.probes.result import Point, TuneResult
from memfit.probes.speed_tradeoff import trade
from memfit.probes.sweep import Swept, sweep
from memfit.probes.sweep_axes import Axis, swept
from memfit.probes.sweep_checkpoint import Sweeps
from memfit.probes.wired_trial import because, with_wired
from memfit.probes.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure, and how it is run.

    The prompt's tokens are counted where it is a text; else it is as long as the workload says.
    ``has_image`` says that the processes run it with an image in it, ``tries_wired`` that it runs
    once more under the recommended wired limit, where there is one. ``axes`` are what is swept,
    their KV bits from the token ``swept_kv_start`` on. ``memory_limit_bytes`` is the most that the
    processes may take; what fits is judged by it. ``force`` runs what the estimate refuses.
    """

    model: str  # as command lines of mlx-lm are to name it
    checkpoint: Checkpoint
    workload: Workload
    prompt: str | None = None
    pasted_prompt: str | None = None  # in those lines; else they read the file or standard input
    prompt_file: str | None = None
    has_image: bool = False
    tries_wired: bool = False
    axes: tuple[Axis, ...] = ()
    swept_kv_start: int = 0
    margin_bytes: int = 0
    memory_limit_bytes: int | None = None
    force: bool = False
    units: Units = Units.GB


class TooLongError(InputError):
    """A prompt beyond the model's own limit; it can be forced."""


def tune(
    request: Request,
    *,
    start: Callable[[], ModelProcess],
    sweeps: Sweeps,
    progress: Progress = NULL_PROGRESS,
) -> TuneResult:
    """Measure, compare and recommend; ``start`` makes a process, measurements go to the store.

    Raises:
        InputError: when the prompt is empty, longer than the model's limit, or of a text without
            a tokenizer; the weights do not match the config; the sweep cannot be.
        UnsupportedError: when mlx-lm has no class for the model, or cannot run the workload.
        MachineError: when MLX is not installed, or there is no room (`RefusedError`).
        SweepInterrupted: on Ctrl-C; the same request goes on from there.
    """
    require_loadable(request.checkpoint)
    if request.has_image and request.axes:
        raise InputError("a prompt with an image is measured as it is: there is nothing to sweep")
    with Worker(start) as worker:
        device = limited(_device(worker), request.memory_limit_bytes)
        prompt = _prompted(worker, request)
        workload = replace(request.workload, prompt_tokens=prompt.tokens)
        with _progress(progress, "estimating", 1):
            sized = _sized(request, device, workload)
        _require_within_limit(sized, workload, force=request.force)
        keep = picture.forget if request.has_image else sweeps.store.save
        bench = Bench(sized, worker, keep, progress.advance)
        if request.axes:
            points, known = _swept(request, bench, workload, sweeps, progress)
        else:
            points, known = tuple(_points(request, bench, workload, progress)), 0
        recommendation = advise(sized, points, request.units)
        if request.tries_wired:
            points, recommendation = with_wired(bench, points, recommendation, request.units)
        elif device.backend != "metal":
            recommendation = because(recommendation, f"the {device.backend} backend has none")
        return _result(request, bench, device, _Found(prompt, points, known, recommendation))


def _swept(
    request: Request, bench: Bench, asked: Workload, sweeps: Sweeps, progress: Progress
) -> Swept:
    combined = swept(request.axes, asked, quantized_kv_start=request.swept_kv_start)
    workloads = tuple(dict.fromkeys((asked, *combined)))
    return sweep(
        bench,
        workloads,
        partial=sweeps.partial(map(bench.id_of, workloads), request.prompt),
        force=request.force,
        units=request.units,
        progress=progress,
    )


def _points(request: Request, bench: Bench, asked: Workload, progress: Progress) -> Iterator[Point]:
    if not request.force:
        require_room(bench.sized, asked, request.units)
    with _progress(progress, "measuring", REPEATS + 1):
        point = bench.measure(asked)
    yield point
    if point.status == "measured" and not request.has_image:
        more = _around(request, bench.sized, asked)
        with _progress(progress, "measuring what a token adds", len(more)):
            yield from (bench.measure_if_supported(workload, repeats=1) for workload in more)


def _around(request: Request, sized: SizedModel, asked: Workload) -> tuple[Workload, ...]:
    """What else to run for the line of a workload; nothing when its prompt is too short."""
    found = calibration(asked)
    if isinstance(found, ShortPrompt):
        return ()
    return tuple(w for w in found if w != asked and not obstacle(sized, w, request.units))


@contextmanager
def _progress(progress: Progress, what: str, steps: int) -> Iterator[None]:
    progress.begin(what, steps)
    try:
        yield
    finally:
        progress.end()


def require_loadable(checkpoint: Checkpoint) -> None:
    """Hold a checkpoint against what mlx-lm loads: a directory of safetensors.

    Raises:
        UnsupportedError: for a GGUF file.
        InputError: for anything else that holds no weights to load.
    """
    if checkpoint.source == "gguf":
        raise UnsupportedError(
            f"{checkpoint.id}: mlx-lm loads no GGUF file; tune a model converted by mlx_lm.convert"
        )
    if checkpoint.tensors is None:
        raise InputError(f"{checkpoint.id}: holds no safetensors to load; give a model's directory")


def require_room_for(
    checkpoint: Checkpoint,
    workload: Workload,
    *,
    margin_bytes: int,
    memory_limit_bytes: int | None,
    units: Units,
) -> None:
    """Hold a model that is still to be downloaded against this machine.

    Raises:
        UnsupportedError: when nobody could run it.
        RefusedError: when there is no room for it.
    """
    if device := detect_host():
        device = limited(device, memory_limit_bytes)
        catalog = Catalog()
        model = catalog.add(checkpoint)
        sized = catalog.sized(model, device=device, margin_bytes=margin_bytes)
        require_room(sized, workload, units)


def _sized(request: Request, device: Device, workload: Workload) -> SizedModel:
    """By trace where a trace of the workload is possible, else by formula."""
    catalog = Catalog()
    model = catalog.add(request.checkpoint)
    sized = partial(catalog.sized, model, device=device, margin_bytes=request.margin_bytes)
    if request.has_image:
        return picture.with_tower(sized(method="formula"))
    try:
        traced = sized(method="trace")
        traced.figures_for(workload)
    except (MachineError, UnsupportedError):
        return sized()
    return traced


def _device(worker: Worker) -> Device:
    backend = worker.versions["backend"]
    device = detect_host(with_gpu=backend != "cpu")
    if device is None:
        raise MachineError("this machine's memory could not be read")
    return device


def _prompted(worker: Worker, request: Request) -> Prompt:
    tokens = request.workload.prompt_tokens if request.prompt is None else None
    return worker.prompt(request.prompt, tokens)


def _require_within_limit(sized: SizedModel, workload: Workload, *, force: bool) -> None:
    limit = sized.model.max_context
    if limit and workload.total_tokens > limit and not force:
        raise TooLongError(
            f"{sized.checkpoint.id}: {workload.total_tokens} tokens of prompt and generation are"
            f" more than the model's own limit of {limit}"
        )


class _Found(NamedTuple):
    """What there is to tell; ``known`` points were measured before."""

    prompt: Prompt
    points: tuple[Point, ...]
    known: int
    recommendation: Recommendation


def _result(request: Request, bench: Bench, device: Device, found: _Found) -> TuneResult:
    sized, points = bench.sized, found.points
    verdict, exceeded = _verdict(sized, points[0])
    line = line_of(points)
    flags = _flags(request, by_measurement(sized, points, line), found)
    versions = bench.worker.versions
    return TuneResult(
        memfit_version=__version__,
        model=model_summary(sized),
        device=device_summary(device),
        mlx_version=versions["mlx"],
        mlx_lm_version=versions["mlx_lm"],
        method=sized.runtime_model.method,
        prompt_tokens=found.prompt.tokens,
        loaded=bench.loaded,
        points=points,
        margin_bytes=sized.margin_bytes,
        verdict=verdict,
        exceeded=exceeded,
        line=line,
        recommendation=found.recommendation,
        trade=trade(points, request.units),
        flags=flags,
        notes=tuple(_notes(request, bench, found, has_flags=bool(flags))),
    )


def _verdict(sized: SizedModel, point: Point) -> tuple[Verdict, tuple[str, ...]]:
    """Judge the measured peak; its largest allocation is the estimate's."""
    if point.peak_bytes is None:
        return "unknown", ()
    largest = sized.figures_for(point.workload).moment.largest_buffer_bytes
    return judge(Need(point.peak_bytes + sized.margin_bytes, largest), sized.device)


def _flags(request: Request, sized: SizedModel, found: _Found) -> tuple[str, ...]:
    asked = found.points[0].workload
    workload = recommended_workload(sized, asked, found.recommendation)
    if workload is None or request.has_image or found.points[0].status != "measured":
        return ()
    if found.prompt.notes:  # no tokenizer: mlx_lm's programs cannot run the model
        return ()
    return command_lines(
        sized,
        workload,
        model=request.model,
        prompt=request.pasted_prompt,
        prompt_file=request.prompt_file,
    )


def _notes(request: Request, bench: Bench, found: _Found, *, has_flags: bool) -> Iterator[Note]:
    sized, workload = bench.sized, found.points[0].workload
    if found.known:
        text = f"{found.known} of {len(found.points)} points were measured before"
        yield Note("info", "resumed", f"{text}, in a sweep that was not finished")
    if bench.unkept:
        yield Note("warning", "not-kept", f"what was measured is not remembered: {bench.unkept}")
    if request.has_image:
        yield from picture.notes(bench.worker.versions["mlx_vlm"])
    if sized.device and sized.device.budget == MEMORY_LIMIT:
        limit = format_bytes(sized.device.working_set_bytes, request.units)
        text = f"what fits is held against the memory limit of {limit}, not the working set"
        yield Note("info", "memory-limit", text)
    for text in found.prompt.notes:
        yield Note("info", "prompt", f"{text}; mlx-lm's programs cannot run the model without one")
    if has_flags and not (request.pasted_prompt or request.prompt_file):
        text = "the line of mlx_lm.generate reads the prompt from standard input: pipe one in"
        yield Note("info", "standard-input", text)
    if request.force and (lacking := obstacle(sized, workload, request.units)):
        yield Note("warning", "forced", f"forced: {lacking}")
    for warning in sized.checkpoint.warnings:
        yield Note("warning", "checkpoint", warning)
    yield from sized.footprint.notes
    yield from workload_notes(sized, workload)
