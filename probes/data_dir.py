"""The directory where memfit keeps what it measured, and the one way files get there."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable

# A file that is not whole yet; of a process that was killed it stays, until another writes there.
_UNFINISHED = ".unfinished-"
_LEFT_OVER_SECONDS = 3600


def memfit_home() -> Path:
    """Return MEMFIT_HOME, else where the platform keeps a user's data."""
    if told := os.environ.get("MEMFIT_HOME"):
        return Path(os.path.expanduser(told))
    from platformdirs import user_data_dir

    return Path(user_data_dir("memfit", appauthor=False))


def write_atomically(path: Path, text: str, *, overwrite: bool = True) -> bool:
    """Write a file that is whole or not there, whatever happens and whoever else writes it.

    Its directory is made. Without ``overwrite`` a file that is there stays, and False is returned.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_leftovers(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(handle)  # a name without content after a power cut is a damaged file
            place = os.replace if overwrite else os.link  # a link never replaces
            place(temporary, path)
            return True
        except FileExistsError:
            return False
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{printable(path)}: cannot be written: {error.strerror};"
            " MEMFIT_HOME names another place"
        ) from None


def _forget_leftovers(directory: Path) -> None:
    oldest = time.time() - _LEFT_OVER_SECONDS
    for file in directory.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if file.stat().st_mtime < oldest:
                file.unlink()
