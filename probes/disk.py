"""Write large files that are complete or absent, and check them again."""

import hashlib
import os
import shutil
from pathlib import Path

from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.files import is_there, open_regular, printable, read_exactly
from memfit.estimators.base.units import Units, format_bytes, format_limit

# Of the free space, what stays free.
_RESERVE = 5  # a fifth
_PART_BYTES = 2**24


def usable_bytes(directory: Path) -> int:
    """Return the free bytes of a directory's disk, less the fifth that stays free.

    Raises:
        InputError: when the directory cannot be read.
    """
    free = _free_bytes(directory)
    return free - free // _RESERVE


def create_directory(directory: Path) -> None:
    """Create a directory and its parents; one that is there, or a file, stays as it is.

    Raises:
        InputError: when it cannot be created.
    """
    if is_there(directory):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from None


def require_free(directory: Path, nbytes: int) -> None:
    """Require that the disk of a directory has room for the bytes, and a fifth of it to spare.

    Raises:
        InputError: when the directory cannot be written.
        MachineError: when the disk is too full.
    """
    free = _free_bytes(directory)
    if not directory.is_dir():
        raise InputError(f"{printable(directory)}: is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"{printable(directory)}: cannot be written: permission denied")
    if nbytes > free - free // _RESERVE:
        needed, there = format_bytes(nbytes, Units.GB), format_limit(free, Units.GB)
        raise MachineError(
            f"{printable(directory)}: needs {needed}, and {there} are free, of which a fifth stays"
        )


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise unwritable(directory, error) from None


def sha256_of(path: Path) -> str:
    """Return the checksum of a regular file, in hexadecimal digits.

    Raises:
        CheckpointError: when it cannot be read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for start in range(0, size := os.fstat(file.fileno()).st_size, _PART_BYTES):
            digest.update(read_exactly(file, min(_PART_BYTES, size - start), path))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: Exception) -> InputError:
    """Return the error of a path that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"{printable(path)}: cannot be written: {printable(reason)}")
