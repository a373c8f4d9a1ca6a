"""The models on this machine: shipped samples, stores of other programs, and folders.

Only names are looked at, and only on disk: a reference is a path or a name in Ollama's store, so
that opening one asks no network.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import list_names, printable, small_text
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.checkpoint.gguf.files import SUFFIX, gguf_models
from memfit.estimators.checkpoint.hub.settings import configured_hub
from memfit.estimators.checkpoint.local.samples import (
    PREFIX,
    sample_file,
    sample_names,
    sample_repositories,
    stated_parameters,
)
from memfit.estimators.checkpoint.local.stores import ollama_models
from memfit.estimators.checkpoint.weight_files import is_weight_file
from memfit.estimators.results.fits import Store

DEPTH = 5
"""Folders below one that is looked through; LM Studio's models are two below."""

_CONFIGS = (".json", ".yaml", ".yml")


class LocalModel(NamedTuple):
    """A model by name, and what opens it."""

    name: str
    store: Store
    reference: str
    parameters: int | None = None
    """Of a model that is shipped with memfit, what is known before it is opened."""


def local_models(folders: Sequence[str]) -> Iterator[LocalModel]:
    """Yield the models of the folders, the stores of other programs and the samples.

    A directory is yielded once.

    Raises:
        CheckpointError: when a folder cannot be listed, or holds no models.
        InputError: when a setting of the Hub's cache cannot be read.
    """
    seen: set[str] = set()
    for folder in folders:
        yield from _folder(_absolute(folder), seen)
    yield from _hub_cache(_absolute(configured_hub().snapshots), seen)
    for directory in _lm_studio():
        for name, path in _below(directory, seen):
            yield LocalModel(printable(name), "lm-studio", str(path))
    for reference in ollama_models():
        yield LocalModel(printable(reference), "ollama", reference)
    yield from shipped_samples()


def shipped_samples() -> Iterator[LocalModel]:
    """Yield the samples."""
    for name in sample_names():
        with sample_file(name) as path:
            yield LocalModel(name, "sample", f"{PREFIX}{name}", stated_parameters(path))


def published_models() -> Iterator[LocalModel]:
    """Yield the models of the index that are of no sample: one of those with the same figures."""
    from memfit.estimators.checkpoint.index.names import is_copy, is_plain
    from memfit.estimators.checkpoint.index.records import PREFIX as INDEX_PREFIX
    from memfit.estimators.checkpoint.index.records import index

    known = index()
    samples = set(sample_repositories())
    for name in known.names:
        if not is_plain(name) or is_copy(name) or name in samples:
            continue
        model = known.model(name)
        if model.config is not None and not model.like:
            yield LocalModel(name, "index", f"{INDEX_PREFIX}{name}", model.parameters)


def _absolute(path: str | Path) -> Path:
    """A path that is no name of another source."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _folder(folder: Path, seen: set[str]) -> Iterator[LocalModel]:
    if not os.path.lexists(folder):
        name = printable(folder.name)
        raise CheckpointError(
            f"{printable(folder)}: no such folder; memfit {name} answers for a model of that name"
        )
    names = list_names(folder)  # one below that cannot be listed is a model that cannot be read
    was_seen = os.path.realpath(folder) in seen
    found = list(_below(folder, seen))
    if not was_seen and folder not in (path for _, path in found):
        found += [(name, folder / name) for name in names if name.endswith(_CONFIGS)]
    if not found and not was_seen:
        raise CheckpointError(
            f"{printable(folder)}: holds no models; give a folder with configs or samples, or with"
            f" config.json or .gguf files in it or up to {DEPTH} folders below"
        )
    for name, path in found:
        yield LocalModel(printable(folder if path == folder else name), "folder", str(path))


def _hub_cache(snapshots: Path, seen: set[str]) -> Iterator[LocalModel]:
    """The snapshot of each repository's main branch, else all that there are."""
    for folder in _entries(snapshots):
        kind, _, name = folder.name.partition("--")
        if kind != "models":
            continue
        shown = name.replace("--", "/", 1)
        for snapshot in _snapshots(folder):
            for below, path in _below(snapshot, seen):
                file = f":{below}" if path != snapshot else ""
                yield LocalModel(printable(f"{shown}{file}"), "hub", str(path))


def _snapshots(repository: Path) -> list[Path]:
    commit = small_text(repository / "refs" / "main")
    found = _entries(repository / "snapshots")
    return [each for each in found if each.name == commit] or found


def _lm_studio() -> list[Path]:
    """Where LM Studio keeps models.

    Source: its lms program, findLMStudioHome: a file names the folder, else it is one of two.
    """
    home = _absolute("~")
    places = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    text = small_text(home / ".lmstudio-home-pointer")
    if text and "\0" not in text:
        places.insert(0, home / text)
    return [place / "models" for place in places if os.path.isdir(place / "models")]


def _below(top: Path, seen: set[str]) -> Iterator[tuple[str, Path]]:
    """The models in a directory, by their paths below it."""
    for path in _walk(top, seen, DEPTH):
        yield str(path.relative_to(top)), path


def _walk(directory: Path, seen: set[str], depth: int) -> Iterator[Path]:
    real = os.path.realpath(directory)
    if real in seen:
        return
    seen.add(real)
    try:
        names = list_names(directory)
    except CheckpointError:
        yield directory  # opening it says why
        return
    in_files = gguf_models(names)
    yield from (directory / name for name in in_files)
    rest = [name for name in names if not name.lower().endswith(SUFFIX)]
    if any(map(is_weight_file, rest)) or (CONFIG in names and not in_files):
        yield directory
    elif depth:
        for name in names:
            if not name.startswith(".") and os.path.isdir(directory / name):
                yield from _walk(directory / name, seen, depth - 1)


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, nothing where there is none."""
    try:
        return [directory / name for name in list_names(directory)]
    except CheckpointError:
        return []
