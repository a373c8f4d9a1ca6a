"""A model of the Hub as a directory on this machine: found in the cache, or downloaded into it."""

import errno
import shutil
import threading
from pathlib import Path, PurePosixPath
from typing import Any

from memfit.estimators.base.errors import (
    CheckpointError,
    InputError,
    MachineError,
    UnreachableError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.units import format_bytes
from memfit.estimators.checkpoint.hub.header_cache import user_cache
from memfit.estimators.checkpoint.hub.http_errors import http_error
from memfit.estimators.checkpoint.hub.listing import Listing
from memfit.estimators.checkpoint.hub.repository import Repository
from memfit.estimators.checkpoint.hub.settings import Hub, configured_hub
from memfit.estimators.checkpoint.local.directory import read_directory

# mlx_lm/utils.py, DEFAULT_ALLOW_PATTERNS, less "*.py": code of a repository is never run.
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
    """A model that would have to be downloaded, which nobody asked for."""


def local_snapshot(
    reference: str, *, download: bool, progress: Progress = NULL_PROGRESS, hub: Hub | None = None
) -> Path:
    """Return the directory of ``org/name[@revision]`` in huggingface-hub's cache.

    What is whole there is used as it is, and nothing is asked of the Hub.

    Raises:
        NotDownloadedError: when it is not whole there, and not to be downloaded.
        CheckpointError: when there is no such repository or revision.
        MachineError: when there is not enough room on the disk.
        InputError: when the cache cannot be written.
        UnreachableError: when the Hub cannot be reached, or refuses.
    """
    hub = hub or configured_hub()
    name, _, revision = reference.partition("@")
    place = printable(reference)
    if (found := _kept(hub, name, revision)) is not None:
        return found
    if not download:
        raise NotDownloadedError(
            f"{place}: is not whole in Hugging Face's cache ({printable(hub.snapshots)})"
        )
    if hub.offline:
        raise UnreachableError(f"{place}: HF_HUB_OFFLINE is set; unset it to download the model")
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
    _require_room(place, nbytes, hub.snapshots)
    progress.begin(f"Downloading {place}", nbytes)
    try:
        return _download(hub, name, revision, progress)
    finally:
        progress.end()


def _kept(hub: Hub, name: str, revision: str) -> Path | None:
    """The snapshot with all that the cache knows to belong to it, and all weights."""
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
    """The bytes of the wanted files that the cache does not hold; blobs are named by digest."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(listing.files, allow_patterns=list(PATTERNS))
    files = [listing.files[name] for name in wanted]
    missing = (f for f in files if not f.digest or not (folder / "blobs" / f.digest).exists())
    return sum(file.size or 0 for file in missing)


def _require_room(place: str, nbytes: int, directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise MachineError(
            f"{place}: {format_bytes(nbytes)} are to be downloaded, and {printable(directory)} has"
            f" {format_bytes(free)} free; make room, or set HF_HOME to another disk"
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
            raise MachineError(f"{name}: the disk is full; what came is kept") from None
        raise InputError(f"{name}: cannot be kept: {printable(error)}; see HF_HOME") from None
    return Path(path)


def _bars(progress: Progress) -> Any:
    """A class of bars that draw nothing and tell the sink of bytes.

    huggingface-hub has a bar for bytes received and one for bytes written, and one for files.
    """
    from tqdm import tqdm

    lock = threading.Lock()
    told = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._counts_bytes, self._done = settings.get("unit") == "B", 0
            super().__init__(*arguments, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal told
            with lock:
                self._done += int(n or 0)
                if self._counts_bytes and self._done > told:
                    progress.advance(self._done - told)
                    told = self._done

    return Bar
