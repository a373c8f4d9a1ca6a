"""``memfit tune``: load and run a model, and compare the measurement with the estimate.

    tune(TuneRequest(model=..., checkpoint=..., workload=...), start=..., sweeps=user_sweeps())

Nothing is loaded before the estimate says that it fits.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress, reported
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.host import detect_host
from memfit.estimators.results.advice import Recommendation
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import LimitName, Verdict
from memfit.estimators.runtimes.budget import Need, judge
from memfit.estimators.runtimes.registry import as_installed
from memfit.estimators.sizing.advise import recommended_here
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import device_summary, model_summary, workload_notes
from memfit.estimators.sizing.peak_fit import ShortPrompt, calibration
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes import vision_estimate
from memfit.probes.command_lines import command_lines, recommended_workload
from memfit.probes.difference_report import difference_report
from memfit.probes.measured_recommendation import advise, by_measurement, line_of
from memfit.probes.preflight import MEMORY_LIMIT, limited, obstacle, require_room
from memfit.probes.process import ModelProcess, TokenizedPrompt
from memfit.probes.result import Point, TuneResult
from memfit.probes.session import STEPS, MeasurementSession
from memfit.probes.speed_tradeoff import speed_tradeoffs
from memfit.probes.sweep import SweepOutcome, sweep
from memfit.probes.sweep_axes import SweepAxis, sweep_workloads
from memfit.probes.sweep_checkpoint import Sweeps
from memfit.probes.wired_trial import with_wired_reason, with_wired_trial
from memfit.probes.worker import Worker


class TuneRequest(Struct, frozen=True, kw_only=True):
    """What to measure, and how to run it."""

    model: str
    """The model's name in the commands for mlx-lm."""
    checkpoint: Checkpoint
    workload: Workload
    prompt: str | None = None
    """The text of the prompt. Without it the prompt has ``workload.prompt_tokens`` tokens."""
    command_prompt: str | None = None
    """The prompt in the commands; without it they read ``prompt_file`` or standard input."""
    prompt_file: str | None = None
    shortest_prompt: int | None = None
    """Tokens of a batch's shortest prompt; such a run is compared, but not saved."""
    tries_wired: bool = False
    """Run once more with the recommended wired limit, where there is one."""
    axes: tuple[SweepAxis, ...] = ()
    """The settings to sweep."""
    sweep_kv_start: int = 0
    """The first token that quantised caches of the sweep quantise."""
    margin_bytes: int = 0
    memory_limit_bytes: int | None = None
    """The most memory that MLX may take; the verdict uses it in place of the working set."""
    force: bool = False
    """Run even when the estimate says that it does not fit."""
    units: Units = Units.GB

    @property
    def has_image(self) -> bool:
        """Whether the prompt has images: mlx-vlm runs the model."""
        return bool(self.workload.images)


class TooLongError(InputError):
    """The prompt is longer than the model's own limit; the caller can force it."""


def tune(
    request: TuneRequest,
    *,
    start: Callable[[], ModelProcess],
    sweeps: Sweeps,
    progress: Progress = NULL_PROGRESS,
) -> TuneResult:
    """Measure, compare and recommend; ``start`` makes a process, measurements are saved.

    Raises:
        InputError: when the prompt is empty or longer than the model's limit, when a text has no
            tokenizer, when the weights do not match the config, or the sweep is not valid.
        UnsupportedError: when mlx-lm has no class for the model, or cannot run the workload.
        MachineError: when MLX is not installed, or there is too little memory (`RefusedError`).
        SweepInterrupted: on Ctrl-C; the same request continues from there.
    """
    require_loadable(request.checkpoint)
    _require_possible_batch(request)
    if request.has_image and request.axes:
        raise InputError("a prompt with an image cannot be swept: its length is fixed")
    with Worker(start) as worker:
        device = limited(measuring_device(worker.versions), request.memory_limit_bytes)
        prompt = _tokenized(worker, request)
        workload = replace(request.workload, prompt_tokens=prompt.tokens)
        if (request.shortest_prompt or 0) > prompt.tokens:
            raise InputError(
                f"the shortest prompt of {request.shortest_prompt} tokens is longer than the"
                f" longest, which has {prompt.tokens}"
            )
        with reported(progress, "estimating", 1):
            estimated = vision_estimate.sized_for_images if workload.images else sized_here
            sized = estimated(
                request.checkpoint, device, workload, margin_bytes=request.margin_bytes
            )
            workload = vision_estimate.known_images(sized, workload)
        require_within_limit(sized, workload, force=request.force)
        is_said = bool(workload.images) == request.has_image and request.shortest_prompt is None
        save = sweeps.store.save if is_said else vision_estimate.do_not_save
        session = MeasurementSession(sized, worker, save, progress.advance)
        if request.axes:
            points, known = _sweep(request, session, workload, sweeps, progress)
        else:
            points, known = tuple(_points(request, session, workload, progress)), 0
        recommendation = advise(sized, points, request.units)
        if request.tries_wired:
            points, recommendation = with_wired_trial(
                session, points, recommendation, request.units
            )
        elif device.backend != "metal":
            recommendation = with_wired_reason(
                recommendation, f"the {device.backend} backend has none"
            )
        return _result(request, session, device, _Findings(prompt, points, known, recommendation))


def is_of_text(request: TuneRequest) -> bool:
    """Whether a run is of prompts of text with one length."""
    return not request.has_image and request.shortest_prompt is None


def _require_possible_batch(request: TuneRequest) -> None:
    """Refuse a batch that mlx-lm's batch generator does not run."""
    workload, shortest = request.workload, request.shortest_prompt
    if workload.batch > 1 and request.has_image:
        raise InputError("a batch has no images: give --batch 1")
    if workload.batch > 1 and workload.kv_bits is not None:
        raise UnsupportedError(
            "mlx-lm's batch generator does not quantise caches: leave out KV bits or the batch"
        )
    batches = sweep_workloads(request.axes, workload) if request.axes else (workload,)
    if (most := max(each.batch for each in batches)) > workload.prefill_batch:
        raise InputError(
            f"a batch of {most} is prefilled in groups of {workload.prefill_batch}, which end one"
            f" after another; to measure all of it together give --prefill-batch {most}"
        )
    if shortest is not None and request.axes:
        raise InputError("a sweep has prompts of one length: leave out the shortest prompt")


def _sweep(
    request: TuneRequest,
    session: MeasurementSession,
    requested: Workload,
    sweeps: Sweeps,
    progress: Progress,
) -> SweepOutcome:
    combined = sweep_workloads(request.axes, requested, quantized_kv_start=request.sweep_kv_start)
    workloads = tuple(dict.fromkeys((requested, *combined)))
    return sweep(
        session,
        workloads,
        checkpoint=sweeps.checkpoint(map(session.id_of, workloads), request.prompt),
        force=request.force,
        units=request.units,
        progress=progress,
    )


def _points(
    request: TuneRequest, session: MeasurementSession, requested: Workload, progress: Progress
) -> Iterator[Point]:
    if not request.force:
        require_room(session.sized, requested, request.units)
    with reported(progress, "measuring", STEPS):
        point = session.measure(requested)
    yield point
    if point.status == "measured" and not request.has_image:
        more = _line_workloads(request, session.sized, requested)
        with reported(progress, "measuring what a token adds", len(more)):
            yield from (session.measure_if_supported(workload, repeats=1) for workload in more)


def _line_workloads(
    request: TuneRequest, sized: SizedModel, requested: Workload
) -> tuple[Workload, ...]:
    """The further workloads that fit a line; none when the prompt is too short."""
    found = calibration(requested)
    if isinstance(found, ShortPrompt):
        return ()
    return tuple(w for w in found if w != requested and not obstacle(sized, w, request.units))


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


def require_room_for(
    checkpoint: Checkpoint,
    workload: Workload,
    *,
    margin_bytes: int,
    memory_limit_bytes: int | None,
    units: Units,
) -> None:
    """Require that a model fits this machine, before it is downloaded.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
        RefusedError: when there is too little memory for it.
    """
    if device := detect_host():
        device = limited(device, memory_limit_bytes)
        catalog = Catalog(versioned=as_installed)
        model = catalog.add(checkpoint)
        sized = catalog.sized(model, device=device, margin_bytes=margin_bytes)
        require_room(sized, workload, units)


def sized_here(
    checkpoint: Checkpoint, device: Device, workload: Workload, *, margin_bytes: int
) -> SizedModel:
    """Size by trace when a trace supports the workload, else by formula.

    Raises:
        UnsupportedError: when neither is possible.
    """
    catalog = Catalog(versioned=as_installed)
    model = catalog.add(checkpoint)
    sized = partial(catalog.sized, model, device=device, margin_bytes=margin_bytes)
    try:
        traced = sized(method="trace")
        traced.figures_for(workload)
    except (MachineError, UnsupportedError):
        return sized()
    return traced


def measuring_device(versions: Mapping[str, str]) -> Device:
    """Return this machine as a process with these versions sees it.

    Raises:
        MachineError: when its memory could not be read.
    """
    device = detect_host(with_gpu=versions["backend"] != "cpu")
    if device is None:
        raise MachineError("this machine's memory could not be read")
    return device


def _tokenized(worker: Worker, request: TuneRequest) -> TokenizedPrompt:
    tokens = request.workload.prompt_tokens if request.prompt is None else None
    return worker.prompt(request.prompt, tokens)


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


class _Findings(NamedTuple):
    prompt: TokenizedPrompt
    points: tuple[Point, ...]
    known: int
    """How many points an earlier, unfinished sweep measured."""
    recommendation: Recommendation


def _result(
    request: TuneRequest, session: MeasurementSession, device: Device, found: _Findings
) -> TuneResult:
    sized, points = session.sized, found.points
    verdict, exceeded = _verdict(sized, points[0])
    line = line_of(points)
    measured = by_measurement(sized, points, line)
    chosen = recommended_workload(measured, points[0].workload, found.recommendation)
    flags = _flags(request, measured, chosen, found)
    versions = session.worker.versions
    return TuneResult(
        model=model_summary(sized),
        device=device_summary(device),
        mlx_version=versions["mlx"],
        mlx_lm_version=versions["mlx_lm"],
        method=sized.runtime_model.source.method,
        prompt_tokens=found.prompt.tokens,
        loaded=session.loaded,
        file_bytes=sized.checkpoint.file_bytes,
        points=points,
        margin_bytes=sized.margin_bytes,
        verdict=verdict,
        exceeded=exceeded,
        line=line,
        recommendation=found.recommendation,
        recommended=recommended_here(measured, chosen) if chosen else None,
        trade=speed_tradeoffs(points, request.units),
        flags=flags,
        report=difference_report(sized, points[0], versions) if is_of_text(request) else (),
        notes=tuple(_notes(request, session, found, has_flags=bool(flags))),
    )


def _verdict(sized: SizedModel, point: Point) -> tuple[Verdict, tuple[LimitName, ...]]:
    """The verdict on the measured peak, with the estimate's largest allocation."""
    if point.peak_bytes is None:
        return "unknown", ()
    largest = sized.figures_for(point.workload).moment.largest_buffer_bytes
    return judge(Need(point.peak_bytes + sized.margin_bytes, largest), sized.device)


def _flags(
    request: TuneRequest, sized: SizedModel, workload: Workload | None, found: _Findings
) -> tuple[str, ...]:
    if workload is None or request.has_image or found.points[0].status != "measured":
        return ()
    if workload.batch > 1:  # mlx_lm.generate runs one sequence
        return ()
    if found.prompt.notes:  # without a tokenizer mlx-lm's programs cannot run the model
        return ()
    return command_lines(
        sized,
        workload,
        model=request.model,
        prompt=request.command_prompt,
        prompt_file=request.prompt_file,
    )


def _notes(
    request: TuneRequest, session: MeasurementSession, found: _Findings, *, has_flags: bool
) -> Iterator[Note]:
    sized, workload = session.sized, found.points[0].workload
    if found.known:
        text = f"{found.known} of {len(found.points)} points were measured before"
        yield Note("info", "resumed", f"{text}, in a sweep that was not finished")
    if session.save_error:
        text = f"the measurement could not be saved: {session.save_error}"
        yield Note("warning", "not-kept", text)
    if request.has_image:
        yield vision_estimate.image_note(sized, workload, session.worker.versions["mlx_vlm"])
    if sized.device and sized.device.budget == MEMORY_LIMIT:
        limit = format_bytes(sized.device.working_set_bytes, request.units)
        text = f"the verdict uses the memory limit of {limit}, not the working set"
        yield Note("info", "memory-limit", text)
    for text in found.prompt.notes:
        yield Note("info", "prompt", f"{text}; mlx-lm's programs cannot run the model without one")
    if has_flags and not (request.command_prompt or request.prompt_file):
        text = "the command for mlx_lm.generate reads the prompt from standard input: pipe one in"
        yield Note("info", "standard-input", text)
    if request.force and (found_obstacle := obstacle(sized, workload, request.units)):
        yield Note("warning", "forced", f"forced: {found_obstacle}")
    for warning in sized.checkpoint.warnings:
        yield Note("warning", "checkpoint", warning)
    yield from sized.footprint.notes
    yield from workload_notes(sized, workload)
