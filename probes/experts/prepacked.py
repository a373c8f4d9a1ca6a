"""A directory with the chosen experts of a model and its other weights, ready to load.

`save` writes it completely or not at all; `check` refuses it when it is damaged, or when the
checkpoint has changed since.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.json import encode, format
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, InputError, MachineError
from memfit.estimators.base.files import UNFINISHED, open_regular, printable, read_whole
from memfit.estimators.base.quantities import Bytes, Count, Line, NonEmpty, Sha256
from memfit.estimators.base.reading.section import json_section
from memfit.estimators.base.reading.typed import to_record
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.result import Result

MANIFEST = "memfit-experts.json"
EXPERTS, OTHERS = "experts.safetensors", "others.safetensors"
_MANIFEST_BYTES = 32 * 10**6
_MANIFEST_VALUES = 2_000_000
# Of the free space, what stays free.
_RESERVE = 5  # a fifth
_PART_BYTES = 2**24


class SourceFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A weight file of the checkpoint, as it was."""

    name: Line
    nbytes: Bytes
    modified_ns: Count


class PackedFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the directory."""

    name: Line
    nbytes: Bytes
    sha256: Sha256


class Manifest(Result, frozen=True, kw_only=True, tag="memfit.experts-pack/1"):
    """What a prepacked directory is made of."""

    fingerprint: Sha256
    """Of the checkpoint's config and headers."""
    revision: Line | None
    """The commit of a model from the Hub."""
    source: tuple[SourceFile, ...]
    profile_sha256: Sha256
    """Of the counts that the experts were chosen by."""
    kept: NonEmpty[NonEmpty[Count]]
    """The experts of each layer in the order of their slots."""
    pinned: tuple[tuple[Count, ...], ...]
    files: tuple[PackedFile, ...]

    @property
    def capacity(self) -> int:
        """Experts of each layer."""
        return len(self.kept[0])


def source_files(path: Path) -> tuple[SourceFile, ...]:
    """Return the weight files of a checkpoint with sizes and times."""
    found = []
    for file in sorted(path.glob("model*.safetensors")):
        status = file.stat()
        found.append(
            SourceFile(name=file.name, nbytes=status.st_size, modified_ns=status.st_mtime_ns)
        )
    return tuple(found)


def require_room(directory: Path, nbytes: int) -> None:
    """Require that a directory can be made, and that the disk has room for the bytes.

    Raises:
        InputError: when it is there and not empty, or cannot be written.
        MachineError: when the disk is too full.
    """
    parent = directory.absolute().parent
    try:
        if os.path.lexists(directory) and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(
                f"{printable(directory)}: exists; remove it, or name another directory"
            )
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise InputError(f"{printable(parent)}: cannot be written: {error.strerror}") from None
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{printable(parent)}: cannot be written: permission denied")
    if nbytes > free - free // _RESERVE:
        needed, there = format_bytes(nbytes, Units.GB), format_bytes(free, Units.GB)
        raise MachineError(
            f"{printable(directory)}: needs {needed}, and {there} are free, of which a fifth stays"
        )


def save(directory: Path, files: Mapping[str, Mapping[str, Any]], manifest: Manifest) -> Manifest:
    """Write arrays and their manifest; the directory appears when all is on the disk.

    Raises:
        InputError: when it cannot be written; nothing is left.
    """
    directory = directory.absolute()
    try:
        temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=UNFINISHED))
    except OSError as error:
        raise _unwritable(directory, error) from None
    try:
        packed = tuple(_written(temporary / name, arrays) for name, arrays in files.items())
        manifest = replace(manifest, files=packed)
        (temporary / MANIFEST).write_bytes(format(encode(manifest), indent=2) + b"\n")
        _sync(temporary / MANIFEST)
        _sync(temporary)
        os.rename(temporary, directory)
        _sync(directory.parent)
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError for a full disk
        raise _unwritable(directory, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def read(directory: Path) -> Manifest:
    """Return the manifest of a directory.

    Raises:
        InputError: when there is none, or it is damaged.
    """
    path = directory / MANIFEST
    content = read_whole(path, limit=_MANIFEST_BYTES)
    top = json_section(content, path, what="the manifest", max_values=_MANIFEST_VALUES)
    return to_record(Manifest, top.values, top.reading)


def check(directory: Path, manifest: Manifest, path: Path, fingerprint: str) -> None:
    """Require that the files are as they were written, and the checkpoint as it was then.

    Raises:
        CheckpointError: naming the first file that is damaged or has changed.
    """
    again = "prepare the directory again with memfit tune experts --prepack"
    if manifest.fingerprint != fingerprint:
        raise CheckpointError(
            f"{printable(directory / MANIFEST)}: fingerprint: it is of another model than"
            f" {printable(path)}; {again}"
        )
    for was, is_now in zip(manifest.source, source_files(path), strict=False):
        if was != is_now:
            raise CheckpointError(
                f"{printable(path / was.name)}: has changed since"
                f" {printable(directory)} was prepared; {again}"
            )
    for file in manifest.files:
        if file.name not in (EXPERTS, OTHERS):
            raise CheckpointError(f"{printable(directory / MANIFEST)}: files: unknown file")
        if _sha256(directory / file.name) != file.sha256:
            raise CheckpointError(
                f"{printable(directory / file.name)}: is damaged: its checksum differs; {again}"
            )


def _written(path: Path, arrays: Mapping[str, Any]) -> PackedFile:
    import mlx.core as mx

    mx.save_safetensors(str(path), dict(arrays), metadata={"format": "mlx"})
    _sync(path)
    return PackedFile(name=path.name, nbytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(directory: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"{printable(directory)}: cannot be written: {printable(reason)}")
