"""``memfit tune --kit``: what only a machine itself can answer, on models that are made for it.

    tune_kit(kit_processes()) -> Kit

The models are small and in a folder that is removed; nothing is saved for estimates. What the
machine cannot answer is a check that was not run.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from msgspec import convert

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress, reported
from memfit.estimators.base.unfinished import unfinished_folder
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.machine.device import Device, KnownDevice
from memfit.estimators.mlx.kernels import PAGE, allocated
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.runtimes.facets import load_bytes
from memfit.probes.experiments.base import Start, measuring_device, sized_here
from memfit.probes.experiments.caches import tune_cache
from memfit.probes.experiments.experts import tune_experts
from memfit.probes.experiments.generate import TuneRequest, tune
from memfit.probes.experiments.points import Points
from memfit.probes.experiments.sweep import Sweeps
from memfit.probes.experts.request import ExpertsRequest
from memfit.probes.kit.models import IMAGE_SIDE, MODELS, Scale, scale_of
from memfit.probes.kit.result import Kit, KitCheck
from memfit.probes.kit.runner import KitRunner
from memfit.probes.prompt_caches.request import CacheRequest
from memfit.probes.result import Point
from memfit.probes.store import Store
from memfit.probes.worker import Worker

_SIZES = (1, PAGE - 1, PAGE, PAGE + 1, 10**6)
_SHOWN = (
    "weights",
    "active",
    "kv",
    "ssm",
    "prefill_peak",
    "decode_peak",
    "peak",
    "held",
    "footprint",
)
_RESTORED_BITS = 4
_EXPERTS = 8
_PROMPT = "Every figure here is counted in bytes, and every byte has a reason."
"""Whose text is in no result."""


class _Kit(NamedTuple):
    """What the parts of the kit share."""

    folder: Path
    start: Callable[..., Any]
    """Makes a process for a model's directory and the fields of `RunnerSetup`."""
    device: Device
    versions: Mapping[str, str]

    @property
    def scale(self) -> Scale:
        return scale_of(self.device.backend)

    @property
    def first(self) -> tuple[str, Workload]:
        """The first workload with its name."""
        return next(iter(self.scale.workloads().items()))

    @property
    def store(self) -> Store:
        """A store that is removed with the models."""
        return Store(self.folder / "measurements")

    def started(self, subject: str) -> Start:
        return partial(self.start, self.folder / subject)

    def made(self, subject: str) -> Path:
        """Return the directory of a model, which is made at its first use."""
        path = self.folder / subject
        if not path.exists():
            path.mkdir()
            with self.start(path, task="kit") as process:
                if subject == "images":
                    process.call(KitRunner.make_seeing, IMAGE_SIDE)
                else:
                    process.call(KitRunner.make, *MODELS[subject])
        return path


def tune_kit(
    start: Callable[..., Any],
    *,
    parts: Sequence[str] = (),
    progress: Progress = NULL_PROGRESS,
) -> Kit:
    """Run all parts, or those of some names, and return what they measured.

    ``start`` makes a process of a model's directory. A part that fails is a check that failed.

    Raises:
        MachineError: when MLX is not installed, or the memory of the machine could not be read.
    """
    began = monotonic()
    chosen = {name: run for name, run in _PARTS.items() if not parts or name in parts}
    with unfinished_folder() as folder, reported(progress, "measuring", len(chosen)):
        with start(folder, task="kit") as process:
            versions = dict(process.versions)
        kit = _Kit(folder, start, measuring_device(versions), versions)
        checks: list[KitCheck] = []
        for name, run in chosen.items():
            checks.extend(_checked(name, run, kit))
            progress.advance()
    return Kit(
        memfit_version=__version__,
        mlx_version=versions["mlx"],
        mlx_lm_version=versions["mlx_lm"],
        mlx_vlm_version=_installed("mlx-vlm"),
        system=_system(),
        device=convert(kit.device, KnownDevice, from_attributes=True),
        seconds=round(monotonic() - began),
        checks=tuple(checks),
    )


def _checked(name: str, run: Callable[[_Kit], Iterator[KitCheck]], kit: _Kit) -> Iterator[KitCheck]:
    """Yield the checks of a part, and one that failed where it ends early."""
    try:
        yield from run(kit)
    except MemfitError as error:
        yield KitCheck(
            subject=name,
            setting="all",
            figure="run",
            status="failed",
            reason=_anonymous(str(error), kit.folder),
        )


def _anonymous(text: str, folder: Path) -> str:
    """Return a message without the folder of the models, and without any other home."""
    for private in (f"{folder.absolute()}/", f"{folder}/", f"{Path.home()}/"):
        text = text.replace(private, "")
    return text


def _not_run(subject: str, figures: Sequence[str], reason: str) -> Iterator[KitCheck]:
    for figure in figures:
        yield KitCheck(
            subject=subject, setting="all", figure=figure, status="not run", reason=reason
        )


def _wired(kit: _Kit) -> Iterator[KitCheck]:
    with kit.start(kit.folder, task="kit") as process:
        answers = process.call(KitRunner.wired)
    figures = {"set": 1, "refused above the working set": 1, "restored": 1}
    if answers is None:
        reason = f"the {kit.device.backend} backend has no wired limit"
        yield from _not_run("wired limit", tuple(figures), reason)
        return
    measured = (bool(answers.set_bytes), answers.refuses, answers.is_restored)
    for (figure, wanted), got in zip(figures.items(), measured, strict=True):
        yield KitCheck(
            subject="wired limit",
            setting="all",
            figure=figure,
            unit="yes",
            estimated=wanted,
            measured=int(got),
        )


def _allocator(kit: _Kit) -> Iterator[KitCheck]:
    """One buffer of each size, and one that is too large."""
    with kit.start(kit.folder, task="kit") as process:
        taken = process.call(KitRunner.allocations, _SIZES)
        refuses = process.call(KitRunner.refuses_largest_buffer)
    for size, nbytes in zip(_SIZES, taken, strict=True):
        yield KitCheck(
            subject="allocator",
            setting=f"{size} bytes",
            figure="allocated",
            estimated=allocated(size, kit.device.backend),
            basis="derived",
            measured=nbytes,
        )
    if refuses is None:
        reason = f"the {kit.device.backend} backend has no largest buffer"
        yield from _not_run("allocator", ("refused above the largest buffer",), reason)
    else:
        yield KitCheck(
            subject="allocator",
            setting="all",
            figure="refused above the largest buffer",
            unit="yes",
            estimated=1,
            measured=int(refuses),
        )


def _model(subject: str, kit: _Kit) -> Iterator[KitCheck]:
    """Generate with one model in several settings, in one process."""
    path = kit.made(subject)
    checkpoint = read_directory(path)
    _, first = kit.first
    sized = sized_here(checkpoint, kit.device, first, margin_bytes=0)
    start = partial(kit.started(subject), footprint=True)
    with Worker(start) as worker:
        worker.prompt(None, first.prompt_tokens)
        session = Points(
            request=TuneRequest(checkpoint=checkpoint, model=subject, workload=first),
            start=start,
            save=kit.store.save,
            versions=kit.versions,
            machine=kit.device,
            sized=sized,
            worker=worker,
        )
        for setting, workload in kit.scale.workloads().items():
            point = session.measure_if_supported(workload, repeats=kit.scale.repeats)
            yield from _of_point(subject, setting, point, kit)
    if session.loaded:
        yield KitCheck(
            subject=subject,
            setting="load",
            figure="peak",
            estimated=max(load_bytes(sized.runtime_model), sized.resident_bytes),
            basis=sized.footprint.basis,
            measured=session.loaded.peak_bytes,
        )
        yield _time(subject, "load", "whole model", session.loaded.load_ns)


def _of_point(subject: str, setting: str, point: Point, kit: _Kit) -> Iterator[KitCheck]:
    if point.status != "measured":
        yield KitCheck(
            subject=subject,
            setting=setting,
            figure="run",
            status="not run" if point.status == "skipped" else "failed",
            reason=_anonymous(point.reason or "the run stopped", kit.folder),
        )
        return
    # With an image the process holds its pixels before the model is loaded.
    hidden = {"active"} if point.workload.images else set()
    for figure in point.figures:
        if (
            figure.name in _SHOWN
            and figure.name not in hidden
            and (figure.measured_bytes or figure.estimated_bytes)
        ):
            yield KitCheck(
                subject=subject,
                setting=setting,
                figure=figure.name.replace("_", " "),
                estimated=figure.estimated_bytes,
                # What is held is read now and then: a run may hold less than at most.
                basis="bound" if figure.name == "held" and figure.basis else figure.basis,
                measured=figure.measured_bytes,
            )
    if speed := point.speed:
        yield _time(subject, setting, "first token", speed.first_token_ns)
        if rate := speed.decode_tokens_per_second:
            yield _time(subject, setting, "token", round(1e9 / rate))


def _time(subject: str, setting: str, figure: str, nanoseconds: int) -> KitCheck:
    return KitCheck(
        subject=subject,
        setting=setting,
        figure=f"time of the {figure}",
        unit="nanoseconds",
        measured=nanoseconds,
    )


def _experts(kit: _Kit) -> Iterator[KitCheck]:
    """The start-up of a part of the experts, which is by layer, and its run."""
    path = kit.made("mixture")
    request = ExpertsRequest(
        checkpoint=read_directory(path),
        path=path,
        prompts=(_PROMPT,),
        capacities=(_EXPERTS,),
        max_tokens=4,
    )
    result = tune_experts(request, start=kit.started("mixture"), store=kit.store)
    for point in result.points:
        setting = f"{point.capacity} experts"
        for name in ("weights", "startup", "prefill_peak", "decode_peak"):
            planned = getattr(point, name)
            yield KitCheck(
                subject="mixture",
                setting=setting,
                figure={"startup": "start-up by layer"}.get(name, name.replace("_", " ")),
                estimated=planned.planned_bytes,
                basis="bound" if name.endswith("peak") else "derived",
                measured=planned.measured_bytes,
            )
        if point.load_ns:
            yield _time("mixture", setting, "start-up", point.load_ns)


def _restores(kit: _Kit) -> Iterator[KitCheck]:
    """The peaks of the ways in which a stored cache is dequantised."""
    path = kit.made("dense")
    _, workload = kit.first
    request = CacheRequest(
        checkpoint=read_directory(path),
        prompt_tokens=(workload.prompt_tokens,),
        stored_bits=(_RESTORED_BITS,),
        max_tokens=2,
        prefill_step=workload.prefill_step,
    )
    result = tune_cache(request, start=kit.started("dense"), store=kit.store)
    [stored] = result.conversations[0].stored
    for restore in stored.restores:
        setting = f"restore of {workload.prompt_tokens} tokens in {_RESTORED_BITS} bits"
        failed = restore.status != "measured"
        yield KitCheck(
            subject="dense",
            setting=setting,
            figure=f"peak, {restore.way}",
            status="failed" if failed else "measured",
            reason=_anonymous(restore.reason or "it stopped", kit.folder) if failed else None,
            estimated=restore.planned_peak_bytes,
            basis="derived" if restore.way == "as-stored" else "bound",
            measured=restore.peak_bytes,
        )


def _images(kit: _Kit) -> Iterator[KitCheck]:
    """A prompt with an image, by mlx-vlm."""
    setting = f"image of {IMAGE_SIDE} x {IMAGE_SIDE}"
    if not _installed("mlx-vlm"):
        yield from _not_run("images", (setting,), "mlx-vlm is not installed")
        return
    path = kit.made("images")
    image = path / "image.png"
    question = WorkloadQuestion.read({"prompt_tokens": "1", "image": [str(image)]})
    result = tune(
        TuneRequest(
            checkpoint=read_directory(path),
            model="images",
            workload=question.under(None),
            prompt=_PROMPT,
        ),
        start=partial(kit.start, path, images=(image,)),
        sweeps=Sweeps(kit.folder / "sweeps", kit.store),
    )
    yield from _of_point("images", setting, result.points[0], kit)


_PARTS: dict[str, Callable[[_Kit], Iterator[KitCheck]]] = {
    "wired limit": _wired,
    "allocator": _allocator,
    **{subject: partial(_model, subject) for subject in MODELS},
    "experts": _experts,
    "restores": _restores,
    "images": _images,
}


def _installed(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _system() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return platform.system() or "unknown"
