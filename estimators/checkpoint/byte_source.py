"""Where header bytes come from: a file here, or ranges of one elsewhere."""

import io
import os
from pathlib import Path
from typing import Protocol

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import open_regular, printable, read_exactly


class ByteSource(Protocol):
    """A file of known size that is read in pieces, mostly forwards."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""

    def read(self, offset: int, count: int) -> bytes:
        """Return exactly ``count`` bytes at ``offset``; both must be within the file.

        Raises:
            MemfitError: when they cannot be read.
        """


class FileSource:
    """A regular file on this machine; a context manager that closes it.

    Raises:
        CheckpointError: when there is no such file, or it may not be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO = open_regular(path)
        self.size: int = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Return exactly ``count`` bytes at ``offset``.

        Raises:
            CheckpointError: when the file became shorter, or cannot be read.
        """
        try:
            self._file.seek(offset)
        except OSError as error:
            raise CheckpointError(f"{printable(self._path)}: cannot be read: {error}") from None
        return read_exactly(self._file, count, self._path)

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()
