"""The directory of memfit's measurements, and the function that writes files there."""

import os
from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, write_atomically


def memfit_home() -> Path:
    """Return MEMFIT_HOME, else the platform's directory for user data."""
    if given := os.environ.get("MEMFIT_HOME"):
        return Path(os.path.expanduser(given))
    from platformdirs import user_data_dir

    return Path(user_data_dir("memfit", appauthor=False))


def save(path: Path, text: str, *, overwrite: bool = True) -> bool:
    """Write a file with `write_atomically`; its directory is created.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_atomically(path, text.encode("utf-8"), overwrite=overwrite, durable=True)
    except OSError as error:
        raise InputError(
            f"{printable(path)}: cannot be written: {error.strerror};"
            " set MEMFIT_HOME to another directory"
        ) from None
