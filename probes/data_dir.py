"""The directory of memfit's measurements, and the function that writes files there."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable

# Prefix of a file that is being written. A killed process leaves it; a later write removes it.
_UNFINISHED = ".unfinished-"
_STALE_SECONDS = 3600


def memfit_home() -> Path:
    """Return MEMFIT_HOME, else the platform's directory for user data."""
    if given := os.environ.get("MEMFIT_HOME"):
        return Path(os.path.expanduser(given))
    from platformdirs import user_data_dir

    return Path(user_data_dir("memfit", appauthor=False))


def write_atomically(path: Path, text: str, *, overwrite: bool = True) -> bool:
    """Write a file completely or not at all, even when other processes write it too.

    The directory is created. Without ``overwrite`` an existing file stays, and the result is False.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale_files(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(handle)  # else a power cut can leave a name without content
            install = os.replace if overwrite else os.link  # link fails when the name exists
            install(temporary, path)
            return True
        except FileExistsError:
            return False
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{printable(path)}: cannot be written: {error.strerror};"
            " set MEMFIT_HOME to another directory"
        ) from None


def _remove_stale_files(directory: Path) -> None:
    oldest = time.time() - _STALE_SECONDS
    for file in directory.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if file.stat().st_mtime < oldest:
                file.unlink()
