"""A local directory for a model on the Hub: found in Hugging Face's cache, or downloaded."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from memfit.estimators.base.errors import (
    CheckpointError,
    InputError,
    MachineError,
    UnreachableError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress, reported
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import format_bytes, format_limit
from memfit.estimators.checkpoint.hub.header_cache import user_cache
from memfit.estimators.checkpoint.hub.http_errors import http_error
from memfit.estimators.checkpoint.hub.listing import Listing
from memfit.estimators.checkpoint.hub.repository import Repository
from memfit.estimators.checkpoint.hub.settings import Hub, configured_hub
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.probes.preflight import require_loadable

# DEFAULT_ALLOW_PATTERNS of mlx_lm/utils.py without "*.py": code of a repository is never run.
PATTERNS = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


class NotDownloadedError(CheckpointError):
    """A model that is not in the cache, and downloading was not allowed."""


def local_snapshot(
    reference: str, *, download: bool, progress: Progress = NULL_PROGRESS, hub: Hub | None = None
) -> Path:
    """Return the directory of ``org/name[@revision]`` in huggingface-hub's cache.

    A complete snapshot is used as it is, without a request to the Hub.

    Raises:
        NotDownloadedError: when the cached copy is incomplete, and ``download`` is false.
        CheckpointError: when there is no such repository or revision.
        MachineError: when there is not enough disk space.
        InputError: when the cache cannot be written.
        UnreachableError: when the Hub cannot be reached, or rejects the request.
    """
    hub = hub or configured_hub()
    name, _, revision = reference.partition("@")
    label = printable(reference)
    if (found := _cached_snapshot(hub, name, revision)) is not None:
        return found
    if not download:
        raise NotDownloadedError(
            f"{label}: is not complete in Hugging Face's cache ({printable(hub.snapshots)})"
        )
    if hub.offline:
        raise UnreachableError(f"{label}: HF_HUB_OFFLINE is set; unset it to download the model")
    repository = Repository(
        hub,
        name,
        revision or "main",
        place=PurePosixPath(reference),
        cache=user_cache(),
        progress=progress,
        listing_only=True,
    )
    if repository.stale:
        raise UnreachableError(repository.stale)
    nbytes = _missing_bytes(repository.listing, _folder(hub, name))
    _require_disk_space(label, nbytes, hub.snapshots)
    with reported(progress, f"Downloading {label}", nbytes):
        return _download(hub, name, revision, progress)


def _cached_snapshot(hub: Hub, name: str, revision: str) -> Path | None:
    """The snapshot's directory when all its known files and all weights are in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            name,
            revision=revision or None,
            cache_dir=hub.snapshots,
            local_files_only=True,
            allow_patterns=list(PATTERNS),
        )
        checkpoint = read_directory(Path(path))
    except HFValidationError as error:
        raise CheckpointError(f"{printable(name)}: not a Hub name: {printable(error)}") from None
    except (CheckpointError, LocalEntryNotFoundError):
        return None
    return Path(path) if checkpoint.tensors is not None else None


def _folder(hub: Hub, name: str) -> Path:
    return hub.snapshots / f"models--{name.replace('/', '--')}"


def _missing_bytes(listing: Listing, folder: Path) -> int:
    """The bytes of the wanted files that the cache lacks; it names blobs by digest."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(listing.files, allow_patterns=list(PATTERNS))
    files = [listing.files[name] for name in wanted]
    missing = (f for f in files if not f.digest or not os.path.exists(folder / "blobs" / f.digest))
    return sum(file.size or 0 for file in missing)


def _require_disk_space(label: str, nbytes: int, directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise MachineError(
            f"{label}: the download takes {format_bytes(nbytes)}, and {printable(directory)} has"
            f" {format_limit(free)} free; free some, or set HF_HOME to another disk"
        )


def _download(hub: Hub, name: str, revision: str, progress: Progress) -> Path:
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            name,
            revision=revision or None,
            endpoint=hub.endpoint,
            cache_dir=hub.snapshots,
            etag_timeout=hub.timeout_seconds,
            allow_patterns=list(PATTERNS),
            tqdm_class=_bars(progress),
        )
    except HfHubHTTPError as error:
        headers = error.response.headers
        raise http_error(
            error.response.status_code,
            headers.get("x-error-code", ""),
            headers.get("x-error-message", ""),
            url=str(error.response.url),
            repository=name,
            endpoint=hub.endpoint,
            has_token="authorization" in error.response.request.headers,
        ) from None
    except (httpx2.HTTPError, LocalEntryNotFoundError) as error:
        raise UnreachableError(f"{name}: the download stopped: {printable(error)}") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise MachineError(
                f"{name}: the disk is full; the files downloaded so far are kept"
            ) from None
        raise InputError(
            f"{name}: cannot be saved: {printable(error)}; HF_HOME sets the directory"
        ) from None
    return Path(path)


def _bars(progress: Progress) -> Any:
    """A tqdm class that draws nothing and reports bytes to ``progress``.

    huggingface-hub shows bars for bytes received, for bytes written and for files. The two byte
    counts follow each other, so the larger one is reported.
    """
    from tqdm import tqdm

    lock = threading.Lock()
    reported = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._counts_bytes, self._done = settings.get("unit") == "B", 0
            super().__init__(*arguments, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal reported
            with lock:
                self._done += int(n or 0)
                if self._counts_bytes and self._done > reported:
                    progress.advance(self._done - reported)
                    reported = self._done

    return Bar


def local_model(
    reference: str, *, before_download: Callable[[Checkpoint], None] | None, progress: Progress
) -> tuple[Checkpoint, Path]:
    """Return a checkpoint and its directory.

    A model on the Hub is downloaded after ``before_download`` accepted its headers; with None
    nothing is downloaded.

    Raises:
        InputError: for a single file of a model, or a model that is not downloaded yet.
        UnsupportedError: for a format that mlx-lm does not load.
    """
    checkpoint = open_checkpoint(reference, progress=progress)
    require_loadable(checkpoint)
    if checkpoint.source == "hub":
        path = _snapshot(checkpoint, before_download, progress)
        # Read it again: from the disk now, not from the Hub's listing.
        return open_checkpoint(reference, progress=progress), path
    # A model in a local store has a reference that is not its directory.
    for path in (Path(os.path.expanduser(reference)), Path(checkpoint.id)):
        if os.path.isdir(path):
            return checkpoint, path
    raise InputError(f"{checkpoint.id}: is one file of a model; give its directory")


def _snapshot(
    checkpoint: Checkpoint, before_download: Callable[[Checkpoint], None] | None, progress: Progress
) -> Path:
    try:
        return local_snapshot(checkpoint.id, download=False, progress=progress)
    except NotDownloadedError as error:
        if before_download is None:
            size = format_bytes(checkpoint.file_bytes)
            raise NotDownloadedError(f"{error}; {setting('download')} fetches its {size}") from None
    before_download(checkpoint)
    return local_snapshot(checkpoint.id, download=True, progress=progress)
