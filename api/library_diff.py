"""Compares the memory of models under two versions of mlx-lm or mlx-vlm, by tracing each."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from msgspec import DecodeError
from msgspec.json import decode, encode

from memfit.estimators.base.errors import InputError, MachineError, UnreachableError
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import Progress, reported
from memfit.estimators.mlx.data.changes import OLDEST_MLX_LM
from memfit.estimators.mlx.versions import format_version, parse_version
from memfit.estimators.results.library_diff import (
    LibraryDiff,
    LoopChange,
    ModelChange,
    PeakChange,
)
from memfit.library_peaks import LibraryPeaks, LibraryQuestion
from memfit.model import open
from memfit.probes.process import CHILD_ENVIRONMENT

Package = Literal["mlx-lm", "mlx-vlm"]
INSTALLED = "installed"
_OLDEST = {"mlx_lm": OLDEST_MLX_LM}
_COMMAND = (sys.executable, "-m", "memfit.library_peaks")
_TIMEOUT_SECONDS = 3600


def library_diff(
    package: Package,
    versions: tuple[str, str],
    models: Sequence[str],
    prompts: Sequence[int],
    device: str,
    *,
    image: str | None,
    progress: Progress,
) -> LibraryDiff:
    """Return what the second version changes against the first.

    A version is one on the package index, ``installed``, or a folder with the package. Each is
    traced in a process of its own with the MLX that is installed; ``prompts`` are in tokens.

    Raises:
        InputError: when a version is none of these, or a model cannot be read.
        MachineError: when MLX is not installed, or a process fails.
        UnreachableError: when a version cannot be downloaded.
    """
    for model in models:
        open(model)
    folders = [_folder(package, version) for version in versions]
    answers: list[LibraryPeaks] = []
    for version, folder in zip(versions, folders, strict=True):
        question = LibraryQuestion(
            folder=None if folder is None else str(folder),
            has_mlx_vlm=_module(package) == "mlx_vlm",
            models=tuple(models),
            prompts=tuple(prompts),
            device=device,
            image=image,
        )
        with reported(progress, f"tracing {package} {version}", 1):
            answers.append(_answer(question, f"{package} {version}"))
    old, new = answers
    return LibraryDiff(
        package=package,
        old_version=old.versions[package],
        new_version=new.versions[package],
        mlx_version=new.versions["mlx"],
        device=device,
        image=image,
        models=tuple(_change(name, prompts, old, new) for name in models),
        loops=tuple(
            LoopChange(prompt, calls, new.calls[prompt])
            for prompt, calls in old.calls.items()
            if calls != new.calls[prompt]
        ),
    )


def _change(
    model: str, prompts: Sequence[int], old: LibraryPeaks, new: LibraryPeaks
) -> ModelChange:
    before, after = old.peaks[model], new.peaks[model]
    return ModelChange(
        model,
        tuple(
            PeakChange(
                prompt,
                None if isinstance(before, str) else before[index],
                None if isinstance(after, str) else after[index],
            )
            for index, prompt in enumerate(prompts)
        ),
        before if isinstance(before, str) else None,
        after if isinstance(after, str) else None,
    )


def _answer(question: LibraryQuestion, name: str) -> LibraryPeaks:
    environment = {**os.environ, "PYTHONSAFEPATH": CHILD_ENVIRONMENT["PYTHONSAFEPATH"]}
    try:
        done = subprocess.run(
            _COMMAND,
            input=encode(question),
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{name}: not traced within an hour; name fewer models") from None
    try:
        return decode(done.stdout, type=LibraryPeaks)
    except DecodeError:
        reason = _last_line(done.stderr) or f"exit code {done.returncode}"
        raise MachineError(f"{name}: cannot be traced: {reason}") from None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return printable(lines[-1]) if lines else ""


def _module(package: Package) -> str:
    return package.replace("-", "_")


def _folder(package: Package, version: str) -> Path | None:
    """The folder that is searched first; None for what is installed."""
    if version == INSTALLED:
        return None
    if (module := Path(version) / _module(package)).is_dir():
        return module.parent.absolute()
    try:
        number = parse_version(version)
    except InputError:
        raise InputError(
            f"--{package} {printable(version)}: name a version such as 0.32.1, a folder with"
            f" {module.name}, or {INSTALLED}"
        ) from None
    if number < (oldest := _OLDEST.get(module.name, ())):
        raise InputError(f"--{package} {version}: it is traced from {format_version(oldest)} on")
    from platformdirs import user_cache_dir

    folder = Path(user_cache_dir("memfit", appauthor=False)) / "packages" / f"{package}-{version}"
    if not folder.is_dir():
        _download(f"{package}=={version}", folder)
    return folder


def _download(requirement: str, folder: Path) -> None:
    """Unpack one wheel into a folder; no code of it runs."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as temporary:
            unpacked = Path(temporary) / "package"
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", str(unpacked)]
            done = subprocess.run(
                [*_installer(), *options, requirement], capture_output=True, check=False
            )
            if done.returncode:
                reason = _last_line(done.stderr) or f"exit code {done.returncode}"
                raise UnreachableError(f"{requirement}: cannot be downloaded: {reason}")
            if not folder.is_dir():  # another process may have been faster
                unpacked.rename(folder)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from None


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise MachineError("a version is downloaded by pip or uv, and neither is installed here")
