"""A directory with the chosen experts of a model and its other weights, ready to load.

`save` writes it completely or not at all; `check` refuses it when it is damaged, or when the
checkpoint has changed since.
"""

import fnmatch
import os
from collections.abc import Mapping, Sequence
from operator import gt
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.json import encode, format
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, InputError
from memfit.estimators.base.files import is_there, list_names, printable, read_whole
from memfit.estimators.base.reading.section import json_section, to_record
from memfit.estimators.base.unfinished import remove_unfinished, unfinished_folder
from memfit.estimators.base.units import Bytes, Count, Line, NonEmpty, Sha256
from memfit.estimators.results.result import Result
from memfit.probes.disk import require_free, sha256_of, sync, unwritable

MANIFEST = "memfit-experts.json"
EXPERTS, OTHERS = "experts.safetensors", "others.safetensors"
_MANIFEST_BYTES = 32 * 10**6
_MANIFEST_VALUES = 2_000_000


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
    """Return the weight files of a checkpoint with sizes and times.

    Raises:
        CheckpointError: when one cannot be looked at.
    """
    found = []
    for name in fnmatch.filter(list_names(path), "model*.safetensors"):
        try:
            status = (path / name).stat()
        except OSError as error:
            raise CheckpointError(f"{printable(path / name)}: {error.strerror}") from None
        found.append(SourceFile(name=name, nbytes=status.st_size, modified_ns=status.st_mtime_ns))
    return tuple(found)


def require_room(directory: Path, nbytes: int) -> None:
    """Require that a directory can be made, and that the disk has room for the bytes.

    Raises:
        InputError: when it is there and not empty, or cannot be written.
        MachineError: when the disk is too full.
    """
    parent = directory.absolute().parent
    remove_unfinished(parent)
    try:
        if os.path.lexists(directory) and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(
                f"{printable(directory)}: exists; remove it, or name another directory"
            )
    except OSError as error:
        raise unwritable(parent, error) from None
    require_free(parent, nbytes)


def save(directory: Path, files: Mapping[str, Mapping[str, Any]], manifest: Manifest) -> Manifest:
    """Write arrays and their manifest; the directory appears when all is on the disk.

    Raises:
        InputError: when it cannot be written; nothing is left.
    """
    directory = directory.absolute()
    try:
        with unfinished_folder(directory.parent) as temporary:
            packed = tuple(_written(temporary / name, arrays) for name, arrays in files.items())
            manifest = replace(manifest, files=packed)
            (temporary / MANIFEST).write_bytes(format(encode(manifest), indent=2) + b"\n")
            sync(temporary / MANIFEST)
            sync(temporary)
            os.rename(temporary, directory)
            sync(directory.parent)
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError for a full disk
        raise unwritable(directory, error) from None
    return manifest


def read(directory: Path) -> Manifest:
    """Return the manifest of a directory.

    Raises:
        InputError: when there is none, or it is damaged.
    """
    path = directory / MANIFEST
    content = read_whole(path, limit=_MANIFEST_BYTES)
    top = json_section(content, path, what="the manifest", max_values=_MANIFEST_VALUES)
    manifest = to_record(Manifest, top.values, top.reading)
    if fault := _fault(manifest):
        raise top.fail(*fault)
    return manifest


def existing(directory: Path, path: Path, fingerprint: str) -> Manifest | None:
    """Return the manifest of a directory that was written before, None when it is to be written.

    Raises:
        InputError: when it is damaged, of another checkpoint, or cannot be written.
    """
    if not is_there(directory / MANIFEST):
        require_room(directory, 0)
        return None
    manifest = read(directory)
    check(directory, manifest, path, fingerprint)
    return manifest


def _fault(manifest: Manifest) -> tuple[str, str] | None:
    """Return the key of a manifest that contradicts itself, and what is wrong."""
    if sorted(file.name for file in manifest.files) != [EXPERTS, OTHERS]:
        return "files", f"expected {EXPERTS} and {OTHERS}"
    if {(len(kept), len(set(kept))) for kept in manifest.kept} != {(manifest.capacity,) * 2}:
        return "kept", "expected equally many experts in each layer, each once"
    pairs = zip(manifest.pinned, manifest.kept, strict=False)
    if len(manifest.pinned) != len(manifest.kept) or not all(set(p) <= set(k) for p, k in pairs):
        return "pinned", "expected some of the kept experts for each layer"
    return None


def require_layers(directory: Path, manifest: Manifest, experts: Sequence[int]) -> None:
    """Require that the kept experts are of layers with these numbers of experts.

    Raises:
        InputError: when they are not.
    """
    most = [max(kept) + 1 for kept in manifest.kept]
    if len(most) != len(experts) or any(map(gt, most, experts)):
        raise InputError(f"{printable(directory / MANIFEST)}: kept: the model has other experts")


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
    if changed := set(manifest.source).symmetric_difference(source_files(path)):
        raise CheckpointError(
            f"{printable(path / min(file.name for file in changed))}: has changed since"
            f" {printable(directory)} was prepared; {again}"
        )
    for file in manifest.files:
        if sha256_of(directory / file.name) != file.sha256:
            raise CheckpointError(
                f"{printable(directory / file.name)}: is damaged: its checksum differs; {again}"
            )


def _written(path: Path, arrays: Mapping[str, Any]) -> PackedFile:
    import mlx.core as mx

    mx.save_safetensors(str(path), dict(arrays), metadata={"format": "mlx"})
    sync(path)
    return PackedFile(name=path.name, nbytes=path.stat().st_size, sha256=sha256_of(path))
