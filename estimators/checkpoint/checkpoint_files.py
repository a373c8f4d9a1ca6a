"""The files of a model: the interface that readers use, and its form for a local directory.

Which files count as weights is decided in weight_files.py, for a directory and for the Hub.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Protocol

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import (
    list_names,
    open_regular,
    printable,
    read_exactly,
    read_whole,
    regular_file_bytes,
    reject_lfs_pointer,
)
from memfit.estimators.checkpoint.manifest import Index
from memfit.estimators.checkpoint.safetensors import LENGTH_BYTES, Header, read_header


class CheckpointFiles(Protocol):
    """A model's files by name; an unavailable file is a MemfitError that names it."""

    @property
    def label(self) -> PurePath:
        """How messages name the place."""

    def names(self) -> Sequence[str]:
        """Return the names at its top level, sorted."""

    def exists(self, name: str) -> bool:
        """Return whether the name exists, at the top level or below."""

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names for which there is no file."""

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a whole small file; one above ``limit`` bytes is refused."""

    def size(self, name: str) -> int:
        """Return the bytes of a file."""

    def pytorch_file_bytes(self, name: str) -> int:
        """Return the bytes of a PyTorch file, after checking that it is not an LFS pointer."""

    def headers(self, names: Sequence[str], index: Index | None) -> Iterable[Header]:
        """Return the headers of safetensors files, in the order of ``names``."""


class Directory:
    """A directory on this machine."""

    def __init__(self, path: Path) -> None:
        """Use a path; nothing is read yet."""
        self.label = path

    def names(self) -> Sequence[str]:
        """Return the names in it, sorted."""
        return list_names(self.label)

    def exists(self, name: str) -> bool:
        """Return whether the name exists, even as a broken link."""
        return os.path.lexists(self.label / name)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names for which there is no file; a broken link counts as missing."""
        return [name for name in names if not os.path.exists(self.label / name)]

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a small file whole."""
        return read_whole(self.label / name, limit=limit)

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return regular_file_bytes(self.label / name)

    def pytorch_file_bytes(self, name: str) -> int:
        """Return the bytes of a PyTorch file; a Git LFS pointer is refused."""
        path = self.label / name
        nbytes = regular_file_bytes(path)
        if nbytes < LENGTH_BYTES:
            raise CheckpointError(
                f"{printable(path)}: {nbytes} bytes is not a PyTorch file; fetch it again"
            )
        with open_regular(path) as file:
            reject_lfs_pointer(read_exactly(file, LENGTH_BYTES, path), path)
        return nbytes

    def headers(self, names: Sequence[str], index: Index | None) -> Iterable[Header]:
        """Return the headers one by one, so that 160 of them are never in memory together."""
        return (read_header(self.label / name) for name in names)
