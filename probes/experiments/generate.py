"""``memfit tune``: load and run a model, and compare the measurement with the estimate.

    tune(TuneRequest(model=..., checkpoint=..., workload=...), start=..., sweeps=user_sweeps())

Nothing is loaded before the estimate says that it fits.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress, reported
from memfit.estimators.base.units import format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.processor import image_plan
from memfit.estimators.machine.host import detect_host
from memfit.estimators.results.advice import Recommendation
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import LimitName, Verdict
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.runtimes.registry import as_installed
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.sizing.advise import recommended_here
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.decode_speed import decode_speed
from memfit.estimators.sizing.estimate import model_summary, workload_notes
from memfit.estimators.sizing.peak_fit import ShortPrompt, calibration
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.difference_report import difference_report
from memfit.probes.experiments.base import RunRequest, Start, measuring_device, sized_here
from memfit.probes.experiments.points import STEPS, Points
from memfit.probes.experiments.recommendation import (
    advise,
    by_measurement,
    command_lines,
    line_of,
    recommended_workload,
    with_wired_reason,
    with_wired_trial,
)
from memfit.probes.experiments.sweep import SweepOutcome, Sweeps, sweep
from memfit.probes.model_runner import TokenizedPrompt
from memfit.probes.preflight import (
    MEMORY_LIMIT,
    limited,
    obstacle,
    require_loadable,
    require_room,
    require_within_limit,
)
from memfit.probes.process import require_installed
from memfit.probes.result import Point, TuneResult
from memfit.probes.speed_tradeoff import speed_tradeoffs
from memfit.probes.sweep_axes import SweepAxis, sweep_workloads
from memfit.probes.worker import Worker


class TuneRequest(RunRequest, frozen=True, kw_only=True):
    """What to measure, and how to run it."""

    model: str
    """The model's name in the commands for mlx-lm."""
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
    footprint: bool = False
    """Read what macOS charges the process for."""
    axes: tuple[SweepAxis, ...] = ()
    """The settings to sweep."""
    sweep_kv_start: int = 0
    """The first token that quantised caches of the sweep quantise."""

    @property
    def has_image(self) -> bool:
        """Whether the prompt has images: mlx-vlm runs the model."""
        return bool(self.workload.images)

    @property
    def is_of_text(self) -> bool:
        """Whether the prompts are of text and of one length."""
        return not self.has_image and self.shortest_prompt is None


def tune(
    request: TuneRequest,
    *,
    start: Start,
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
        versions = worker.versions
        device = limited(measuring_device(versions), request.memory_limit_bytes)
        prompt = _tokenized(worker, request)
        workload = replace(request.workload, prompt_tokens=prompt.tokens)
        if (request.shortest_prompt or 0) > prompt.tokens:
            raise InputError(
                f"the shortest prompt of {request.shortest_prompt} tokens is longer than the"
                f" longest, which has {prompt.tokens}"
            )
        with reported(progress, "estimating", 1):
            sized = sized_here(
                request.checkpoint, device, workload, margin_bytes=request.margin_bytes
            )
            workload = _with_known_images(sized, workload)
        require_within_limit(sized, workload, force=request.force)
        is_described = bool(workload.images) == request.has_image and not request.shortest_prompt
        session = Points(
            request=request,
            start=start,
            save=sweeps.store.save if is_described else _do_not_save,
            progress=progress,
            versions=versions,
            machine=device,
            sized=sized,
            worker=worker,
        )
        if request.axes:
            points, known = _sweep(request, session, workload, sweeps)
        else:
            points, known = tuple(_points(request, session, workload)), 0
        recommendation = advise(sized, points, request.units)
        if request.tries_wired:
            points, recommendation = with_wired_trial(
                session, points, recommendation, request.units
            )
        elif device.backend != "metal":
            recommendation = with_wired_reason(
                recommendation, f"the {device.backend} backend has none"
            )
        return _result(request, session, _Findings(prompt, points, known, recommendation))


def require_startable(request: TuneRequest) -> None:
    """Require what a run needs, before its model is downloaded: libraries and memory.

    Raises:
        MachineError: when MLX or mlx-lm is not installed, or mlx-vlm for an image.
        UnsupportedError: when the runtime cannot run the workload.
        RefusedError: when there is too little memory for it.
    """
    require_installed(has_image=request.has_image)
    if request.force or (device := detect_host()) is None:
        return
    catalog = Catalog(versioned=as_installed)
    sized = catalog.sized(
        catalog.add(request.checkpoint),
        device=limited(device, request.memory_limit_bytes),
        margin_bytes=request.margin_bytes,
    )
    require_room(sized, request.workload, request.units)


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
    session: Points,
    requested: Workload,
    sweeps: Sweeps,
) -> SweepOutcome:
    combined = sweep_workloads(request.axes, requested, quantized_kv_start=request.sweep_kv_start)
    workloads = tuple(dict.fromkeys((requested, *combined)))
    return sweep(
        session,
        workloads,
        checkpoint=sweeps.checkpoint(map(session.id_of, workloads), request.prompt),
    )


def _points(request: TuneRequest, session: Points, requested: Workload) -> Iterator[Point]:
    if not request.force:
        require_room(session.sized, requested, request.units)
    with reported(session.progress, "measuring", STEPS):
        point = session.measure(requested)
    yield point
    if point.status == "measured" and not request.has_image:
        more = _line_workloads(request, session.sized, requested)
        with reported(session.progress, "measuring what a token adds", len(more)):
            yield from (session.measure_if_supported(workload, repeats=1) for workload in more)


def _line_workloads(
    request: TuneRequest, sized: SizedModel, requested: Workload
) -> tuple[Workload, ...]:
    """The further workloads that fit a line; none when the prompt is too short."""
    found = calibration(requested)
    if isinstance(found, ShortPrompt):
        return ()
    return tuple(w for w in found if w != requested and not obstacle(sized, w, request.units))


def _tokenized(worker: Worker, request: TuneRequest) -> TokenizedPrompt:
    tokens = request.workload.prompt_tokens if request.prompt is None else None
    return worker.prompt(request.prompt, tokens)


class _Findings(NamedTuple):
    prompt: TokenizedPrompt
    points: tuple[Point, ...]
    known: int
    """How many points an earlier, unfinished sweep measured."""
    recommendation: Recommendation


def _result(request: TuneRequest, session: Points, found: _Findings) -> TuneResult:
    sized, points = session.sized, found.points
    verdict, exceeded = _verdict(sized, points[0])
    line = line_of(points)
    measured = by_measurement(sized, points, line)
    chosen = recommended_workload(measured, points[0].workload, found.recommendation)
    flags = _flags(request, measured, chosen, found)
    header = session.header() | {"model": model_summary(sized)}
    del header["model_type"]
    return TuneResult(
        **header,
        method=sized.runtime_model.source.method,
        prompt_tokens=found.prompt.tokens,
        loaded=session.loaded,
        file_bytes=sized.checkpoint.file_bytes,
        points=points,
        margin_bytes=sized.margin_bytes,
        first_token=next(iter(first_tokens(sized, points[0].workload)), None),
        decode_speed=decode_speed(sized, points[0].workload),
        verdict=verdict,
        exceeded=exceeded,
        line=line,
        recommendation=found.recommendation,
        recommended=recommended_here(measured, chosen) if chosen else None,
        trade=speed_tradeoffs(points, request.units),
        flags=flags,
        report=difference_report(sized, points[0], session.versions) if request.is_of_text else (),
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
    request: TuneRequest, session: Points, found: _Findings, *, has_flags: bool
) -> Iterator[Note]:
    sized, workload = session.sized, found.points[0].workload
    if found.known:
        text = f"{found.known} of {len(found.points)} points were measured before"
        yield Note("info", "resumed", f"{text}, in a sweep that was not finished")
    yield from session.notes[-1:]  # the last measurement that could not be saved
    if request.has_image:
        yield _image_note(sized, workload, session.versions["mlx_vlm"])
    if sized.device and sized.device.budget == MEMORY_LIMIT:
        limit = format_limit(sized.device.working_set_bytes, request.units)
        text = f"the verdict uses the memory limit of {limit}, not the working set"
        yield Note("info", "memory-limit", text)
    if request.footprint and sys.platform != "darwin":
        text = "--footprint: only macOS says what it charges a process for; see the resident size"
        yield Note("warning", "footprint", text)
    for text in found.prompt.notes:
        yield Note("info", "prompt", f"{text}; mlx-lm's programs cannot run the model without one")
    if has_flags and not (request.command_prompt or request.prompt_file):
        text = "the command for mlx_lm.generate reads the prompt from standard input: pipe one in"
        yield Note("info", "standard-input", text)
    if request.force and (reason := obstacle(sized, workload, request.units)):
        yield Note("warning", "forced", f"forced: {reason}")
    for warning in sized.checkpoint.warnings:
        yield Note("warning", "checkpoint", warning)
    yield from sized.footprint.notes
    yield from workload_notes(sized, workload)


def _with_known_images(sized: SizedModel, workload: Workload) -> Workload:
    """Return a workload of a whole prompt with how many of its tokens are of images.

    It has no images where the processor or the tower is not described.
    """
    if not workload.images:
        return workload
    try:
        tokens = image_plan(sized.checkpoint, workload.images).token_count
        known = replace(workload, images=replace(workload.images, tokens=tokens))
        sized.figures_for(known)
    except (InputError, UnsupportedError):
        return replace(workload, images=UNSET)
    return known


def _do_not_save(measurement: Measurement) -> None:
    """Save nothing: the workload does not say all that was run."""


def _image_note(sized: SizedModel, workload: Workload, mlx_vlm_version: str) -> Note:
    tower = "is without the work of the vision tower, and the measurement is not saved"
    if workload.images:
        basis, _ = sized.runtime_model.basis("workspace", workload)
        tower = "is traced" if basis == "traced" else "is an upper bound by formula"
    return Note("info", "image", f"run by mlx-vlm {mlx_vlm_version}; the estimate {tower}")
