"""Safe access to paths that may be anything: a pipe, a device, a broken link."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.unfinished import unfinished_file

_SHOWN_CHARACTERS = 200
_MAX_TEXT_BYTES = 4096
# The first eight bytes of what `git clone` leaves in place of a large file without Git LFS
# (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
_LFS_POINTER = b"version "


def printable(text: object) -> str:
    """Return a path, or text from a file, so that it fits one line of a message.

    >>> printable("two\\nlines")
    'two\\\\nlines'
    """
    line = str(text)
    if not line.isprintable():
        line = line.encode("unicode_escape").decode("ascii")
    return (
        line
        if isinstance(text, PurePath) or len(line) <= _SHOWN_CHARACTERS
        else line[:_SHOWN_CHARACTERS] + "..."
    )


def short(value: Any) -> str:
    """Return the first characters of a value, escaped, for a message."""
    return printable(repr(value)[:60])


def regular_file_bytes(path: Path) -> int:
    """Return the size of a regular file, or the file that a link points to.

    Raises:
        CheckpointError: when there is no such file, the link is broken, or it is a directory,
            a pipe or a device, which must not be opened.
    """
    with _errors_of(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{printable(path)}: is not a regular file")
    return status.st_size


def is_there(path: Path) -> bool:
    """Return whether there is a file of this name, or a link, even a broken one.

    Raises:
        CheckpointError: when that cannot be known: a file that may not be seen is not absent.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{printable(path)}: {_reason(error, path)}") from None
    return True


def path_near(directory: Path | None, path: str) -> str:
    """Return a relative path as one in a directory, where there is such a file, else as it is.

    Raises:
        CheckpointError: when another file has the path from the working directory.
    """
    near = os.path.join(directory, path) if directory else path
    if not os.path.lexists(near):
        return path
    if os.path.lexists(path) and not _is_same(near, path):
        raise CheckpointError(
            f"{printable(path)}: found in {printable(Path(near).parent)} and in the working"
            " directory; give the whole path"
        )
    return near


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.abspath(one) == os.path.abspath(other)


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for unbuffered reading, without blocking.

    Raises:
        CheckpointError: as `regular_file_bytes`, or when the file may not be read.
    """
    regular_file_bytes(path)
    with _errors_of(path):
        return io.FileIO(path, "r", opener=_open_without_waiting)


def read_exactly(file: io.FileIO, count: int, path: Path) -> bytes:
    """Return the next ``count`` bytes, and nothing beyond them.

    Raises:
        CheckpointError: when the file is shorter, or cannot be read.
    """
    parts = []
    while count > 0:
        with _errors_of(path):
            part = file.read(count)
        if not part:
            raise CheckpointError(f"{printable(path)}: the file became shorter while it was read")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_whole(path: Path, *, limit: int) -> bytes:
    """Return the bytes of a small text file.

    Raises:
        CheckpointError: when it is not a regular file, cannot be read or is above ``limit`` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(
                f"{printable(path)}: {size} bytes; such a file may have at most {limit}"
            )
        return read_exactly(file, size, path)


def small_text(path: Path) -> str:
    """Return the text of a small file, such as a commit; empty where there is none."""
    try:
        return read_whole(path, limit=_MAX_TEXT_BYTES).decode("utf-8").strip()
    except (CheckpointError, UnicodeDecodeError):
        return ""


def list_names(directory: Path) -> list[str]:
    """Return the names in a directory, sorted.

    Raises:
        CheckpointError: when it cannot be listed.
    """
    with _errors_of(directory):
        return sorted(os.listdir(directory))


def write_atomically(
    path: Path,
    content: bytes,
    *,
    mode: int | None = None,
    overwrite: bool = True,
    durable: bool = False,
) -> bool:
    """Write a file completely or not at all, even when other processes write it too.

    Without ``mode`` only the user may read and write it. ``durable`` waits until the content is on
    the disk: else a power cut can leave a name without content. Without ``overwrite`` an existing
    file stays, and the result is False.

    Raises:
        OSError: when the file cannot be written; nothing is left in its directory.
    """
    with unfinished_file(path.parent) as (temporary, handle):
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(handle)
        if mode is not None:
            os.chmod(temporary, mode)
        try:
            # A link fails when the name exists.
            (os.replace if overwrite else os.link)(temporary, path)
        except FileExistsError:
            if overwrite:
                raise
            return False
    return True


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Let one process at a time run the block for a directory, where its file system can tell.

    Raises:
        CheckpointError: when the directory cannot be opened.
    """
    import fcntl  # for the commands that change what they have read

    with _errors_of(directory):
        handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # releases the lock


def reject_lfs_pointer(first_bytes: bytes, path: PurePath) -> None:
    """Raise CheckpointError when a file begins as the pointer that Git LFS leaves for it."""
    if first_bytes.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{printable(path)}: is a Git LFS pointer, not the file itself;"
            " run 'git lfs pull' there"
        )


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn the system's errors into a CheckpointError that names the path."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{printable(path)}: {_reason(error, path)}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    # If a pipe has replaced the file since the check, a blocking open() would never return.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _reason(error: OSError | ValueError, path: Path) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOENT:
        return "is a broken link" if os.path.islink(path) else "no such file"
    if code in (errno.EACCES, errno.EPERM):
        return "permission denied; make it readable first"
    if code == errno.ELOOP:
        return "is a link that leads back to itself"
    text = error.strerror if isinstance(error, OSError) and error.strerror else "is not a path"
    return f"cannot be read: {text}"
