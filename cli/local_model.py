"""Find the local directory from which a model can be loaded."""

import os
from collections.abc import Callable
from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.progress import Progress
from memfit.estimators.base.units import format_bytes
from memfit.estimators.checkpoint.manifest import Checkpoint


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
    from memfit.estimators.checkpoint.opening import open_checkpoint
    from memfit.probes.preflight import require_loadable

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
    from memfit.probes.download import NotDownloadedError, local_snapshot

    try:
        return local_snapshot(checkpoint.id, download=False, progress=progress)
    except NotDownloadedError as error:
        if before_download is None:
            size = format_bytes(checkpoint.file_bytes)
            raise NotDownloadedError(f"{error}; --download fetches its {size}") from None
    before_download(checkpoint)
    return local_snapshot(checkpoint.id, download=True, progress=progress)
