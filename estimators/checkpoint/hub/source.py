"""Names on the Hub: ``org/name[@revision]``, answered from headers alone; docs/hub.md."""

import os
from pathlib import Path, PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.files import printable, small_text
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.checkpoint.hub.header_cache import HeaderCache, user_cache
from memfit.estimators.checkpoint.hub.repository import Repository
from memfit.estimators.checkpoint.hub.settings import Hub, configured_hub
from memfit.estimators.checkpoint.kinds import kind_of_files
from memfit.estimators.checkpoint.local.directory import read_checkpoint_files, read_directory
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.weight_files import is_weight_file

DEFAULT_REVISION = "main"
_GGUF = ".gguf"


class _Snapshot(Struct, frozen=True):
    """A repository at a commit as huggingface-hub downloaded it, whole or in part."""

    directory: Path
    commit: str


def open_hub_file(
    reference: str,
    *,
    progress: Progress = NULL_PROGRESS,
    hub: Hub | None = None,
    cache: HeaderCache | None = None,
) -> Checkpoint:
    """Return the checkpoint of a GGUF file, or of its series, in a repository.

    The reference is ``org/name:file.gguf`` or ``org/name@revision:file.gguf``, or has in place of
    the file its quantisation, such as ``Q4_K_M``. Only headers are fetched, by ranges.

    Raises:
        CheckpointError: when there is no such repository, revision or file, or its header is
            inconsistent.
        UnreachableError: when the Hub cannot be reached, or refuses.
        UnsupportedError: for a file that is not a model, or not described.
    """
    # Imported for a GGUF file alone: most repositories are of safetensors.
    from memfit.estimators.checkpoint.gguf.files import read_gguf_file
    from memfit.estimators.checkpoint.hub.gguf import read_hub_gguf

    place, _, file = reference.partition(":")
    name, _, revision = place.partition("@")
    revision = revision or DEFAULT_REVISION
    _reject_bad_name(name, revision, reference)
    cache = cache or user_cache()
    hub = hub or configured_hub()
    file = _kept_file(hub.snapshots, name, revision, file) or file
    if snapshot := _find_snapshot(hub.snapshots, name, revision, file):
        found = read_gguf_file(snapshot.directory / file, id=printable(reference))
        return _at(found, snapshot.commit, revision, _not_asked(reference, snapshot))
    # Messages name a file as repository/file, as its URL does.
    repository = Repository(
        hub,
        name,
        revision,
        place=PurePosixPath(place),
        cache=cache,
        progress=progress,
        listing_only=True,
    )
    checkpoint = read_hub_gguf(repository, file, id=printable(reference))
    cache.trim()
    return _at(checkpoint, repository.listing.commit, revision, repository.stale)


def open_hub(
    reference: str,
    *,
    progress: Progress = NULL_PROGRESS,
    hub: Hub | None = None,
    cache: HeaderCache | None = None,
    picks: bool = False,
) -> Checkpoint:
    """Return the checkpoint of a repository: its config, index and headers, never its weights.

    A snapshot that huggingface-hub has downloaded is read from disk without a request. With
    ``picks`` the usual file of a repository of GGUF files is opened.

    Raises:
        CheckpointError: when there is no such repository or revision, or its files are
            inconsistent.
        ConfigError: when its config is not one.
        UnreachableError: when the Hub cannot be reached, or refuses.
    """
    name, _, revision = reference.partition("@")
    revision = revision or DEFAULT_REVISION
    _reject_bad_name(name, revision, reference)
    hub = hub or configured_hub()
    snapshot = _find_snapshot(hub.snapshots, name, revision)
    if snapshot and (found := _read_snapshot(snapshot, reference, offline=hub.offline)):
        return found
    cache = cache or user_cache()
    place = PurePosixPath(reference)
    repository = Repository(hub, name, revision, place=place, cache=cache, progress=progress)
    if picks and _is_of_gguf(repository):
        from memfit.estimators.checkpoint.hub.gguf import read_usual_gguf

        checkpoint = read_usual_gguf(repository, reference)
    else:
        _reject_without_config(repository)
        checkpoint = read_checkpoint_files(repository, "hub")
    cache.trim()
    return _at(checkpoint, repository.listing.commit, revision, repository.stale)


def _at(checkpoint: Checkpoint, commit: str, revision: str, doubt: str) -> Checkpoint:
    """A checkpoint at a commit; ``doubt`` is why the revision may be at another one by now."""
    # A commit never changes, so that no warning is needed.
    doubts = (doubt,) if doubt and revision != commit else ()
    return replace(
        checkpoint,
        revision=commit,
        stale=doubt if doubts else None,
        warnings=(*checkpoint.warnings, *doubts),
    )


def _not_asked(reference: str, snapshot: _Snapshot) -> str:
    return (
        f"{printable(reference)}: read from Hugging Face's cache, commit {snapshot.commit[:12]};"
        " the Hub was not asked"
    )


def _reject_bad_name(name: str, revision: str, reference: str) -> None:
    parts = [*name.split("/"), *revision.split("/")]
    # The name becomes part of a path and of an address.
    if any(part in ("", ".", "..") for part in parts) or name.count("/") != 1:
        raise CheckpointError(f"{printable(reference)!r}: not a Hub name; write org/name@revision")


def _find_snapshot(
    snapshots: Path, name: str, revision: str, file: str = CONFIG
) -> _Snapshot | None:
    # The layout of huggingface_hub's cache: refs/REVISION has the commit of snapshots/COMMIT.
    folder = snapshots / f"models--{name.replace('/', '--')}"
    commit = small_text(folder / "refs" / revision) or revision
    directory = folder / "snapshots" / commit
    # A revision such as refs/pr/1 that was never resolved is not a commit hash.
    is_there = os.path.isfile(directory / file) if file else os.path.isdir(directory)
    found = commit.isalnum() and is_there
    return _Snapshot(directory, commit) if found else None


def _kept_file(snapshots: Path, name: str, revision: str, wanted: str) -> str:
    """The downloaded file of a quantisation; empty where there is none."""
    from memfit.estimators.checkpoint.gguf.files import SUFFIX, choose_model

    snapshot = _find_snapshot(snapshots, name, revision, "")
    if snapshot is None or wanted.lower().endswith(SUFFIX):
        return ""
    files = (path for path in snapshot.directory.rglob("*") if path.is_file())
    try:
        return choose_model(
            [str(path.relative_to(snapshot.directory)) for path in files], wanted, name
        )
    except CheckpointError:
        return ""


def _read_snapshot(snapshot: _Snapshot, reference: str, *, offline: bool) -> Checkpoint | None:
    """The checkpoint of a snapshot; None for a part of one, where the Hub can be asked."""
    try:
        # A download that was interrupted leaves a part of a snapshot.
        checkpoint = read_directory(snapshot.directory)
    except CheckpointError:
        if offline:
            raise
        return None
    if checkpoint.tensors is None and not offline:
        return None
    found = replace(checkpoint, id=printable(reference), source="hub")
    revision = reference.partition("@")[2]
    return _at(found, snapshot.commit, revision, _not_asked(reference, snapshot))


def _is_of_gguf(repository: Repository) -> bool:
    """Whether it holds GGUF models and no others; many have the config of the original too."""
    if any(map(is_weight_file, (n for n in repository.names() if not n.lower().endswith(_GGUF)))):
        return False
    if not any(name.lower().endswith(_GGUF) for name in repository.listing.files):
        return False
    from memfit.estimators.checkpoint.gguf.files import gguf_models

    return bool(gguf_models(list(repository.listing.files)))


def _reject_without_config(repository: Repository) -> None:
    if repository.exists(CONFIG):
        return
    names = repository.names()
    if kind := kind_of_files(names):
        raise UnsupportedError(f"{printable(repository.label)}: {kind}, not a language model")
    fault = "has no config.json; give a model's repository"
    if gguf := [name for name in names if name.lower().endswith(".gguf")]:
        name = str(repository.label).partition("@")[0]
        fault = (
            f"holds GGUF files and no config.json; name one of them, {name}:{printable(gguf[0])}"
        )
    elif "adapter_config.json" in names:
        fault = "has no config.json; it holds an adapter, give the model that it was trained on"
    raise CheckpointError(f"{printable(repository.label)}: {fault}")
