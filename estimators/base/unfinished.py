"""Files and folders that are removed again, by the next run where this one is killed.

Each is locked by the process that writes it, and a lock ends with its process: what has the name
and no lock was left by a process that is gone.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".memfit-unfinished-"
"""Prefix of the names; only a killed process leaves one."""
# tempfile adds eight such characters (CPython, Lib/tempfile.py, _RandomNameSequence).
_NAME = re.compile(rf"{re.escape(UNFINISHED)}[a-z0-9_]{{8}}(\.\w+)?")


@contextmanager
def unfinished_file(directory: Path, *, suffix: str = "") -> Iterator[tuple[Path, int]]:
    """Give a new file and its open descriptor; what is left of it after the block is removed.

    Raises:
        OSError: when it cannot be made.
    """
    import tempfile  # not needed for an answer on the terminal

    remove_unfinished(directory)
    while True:
        handle, name = tempfile.mkstemp(dir=directory, prefix=UNFINISHED, suffix=suffix)
        try:
            if _is_locked(handle):
                yield Path(name), handle
                return
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
            os.close(handle)


@contextmanager
def unfinished_folder(directory: Path | None = None) -> Iterator[Path]:
    """Give a new folder, by default in that for temporary files; it is removed after the block.

    Raises:
        OSError: when it cannot be made.
    """
    import shutil
    import tempfile

    directory = directory or Path(tempfile.gettempdir())
    remove_unfinished(directory)
    while True:
        name = tempfile.mkdtemp(dir=directory, prefix=UNFINISHED)
        handle = -1
        try:
            with suppress(FileNotFoundError):  # another process may have removed it already
                handle = os.open(name, os.O_RDONLY)
            if handle >= 0 and _is_locked(handle):
                yield Path(name)
                return
        finally:
            shutil.rmtree(name, ignore_errors=True)
            if handle >= 0:
                os.close(handle)


def remove_unfinished(directory: Path) -> None:
    """Remove what processes of this user that are gone have left in a directory."""
    with suppress(OSError), os.scandir(directory) as entries:
        left = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
        for path in left:
            with suppress(OSError):
                _remove(path)


def _remove(path: str) -> None:
    import fcntl
    import shutil

    # A pipe must not block, and a link must not lead elsewhere.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path)
        elif stat.S_ISREG(status.st_mode):
            os.unlink(path)
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
    """Lock a new file or folder; False when another process has removed it before."""
    import fcntl

    with suppress(OSError):  # a file system without locks: nobody removes it there
        fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fstat(handle).st_nlink > 0
