"""GGUF checkpoints: one file, or a series -00001-of-0000N of them, local or remote."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.files import printable, regular_file_bytes
from memfit.estimators.base.nearest import nearest
from memfit.estimators.checkpoint.byte_source import ByteSource, FileSource
from memfit.estimators.checkpoint.gguf.header import GgufHeader, Value, read_gguf
from memfit.estimators.checkpoint.manifest import Checkpoint, SkippedFile, Tensor
from memfit.estimators.checkpoint.shards import list_some

SUFFIX = ".gguf"
MAX_SPLITS = 1000  # the numbers have five digits; the largest published series has some forty
# llama.cpp's own pattern: src/llama.cpp, llama_split_path.
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = "mmproj"
# Of ggml's types and llama.cpp's mixtures of them (tools/quantize); UD- is Unsloth's own mixture.
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[1-8]_\w+|TQ[12]_0|BF16|F16|F32|MXFP4\w*|NVFP4))$", re.IGNORECASE
)
_NOT_MODELS = {
    "adapter": "an adapter; give the model that it was trained on",
    "imatrix": "an importance matrix, not a model",
    "mmproj": "a vision projector; give the model it belongs to",
    "vocab": "a vocabulary without a model",
}


class GgufFile(NamedTuple):
    """One file of a checkpoint: its name in messages, and where its bytes come from."""

    name: str
    source: ByteSource


def series(name: str) -> tuple[str, ...]:
    """Return the names of all files a GGUF file's name speaks of, itself alone as a rule.

    Raises:
        CheckpointError: when its numbers are no series.

    >>> series("a-00002-of-00002.gguf")
    ('a-00001-of-00002.gguf', 'a-00002-of-00002.gguf')
    """
    split = _SPLIT.fullmatch(name)
    if split is None:
        return (name,)
    total = int(split["total"])
    if not 1 <= int(split["number"]) <= total <= MAX_SPLITS:
        raise CheckpointError(
            f"{printable(name)}: is not part of a series of 1 to {MAX_SPLITS} files"
        )
    end = name[-len(SUFFIX) :]
    return tuple(f"{split['stem']}-{i:05d}-of-{total:05d}{end}" for i in range(1, total + 1))


def gguf_checkpoint(
    parts: Sequence[GgufFile],
    *,
    id: str,
    skipped_files: tuple[SkippedFile, ...] = (),
    revision: str | None = None,
) -> Checkpoint:
    """Return the checkpoint of a file, or of all files of a series in their order.

    Its config is the metadata of the first file, and is named after that file.

    Raises:
        CheckpointError: when a header is inconsistent, or the files are of different series.
        UnsupportedError: for a file that is not a text model, and for undescribed versions or
            types.
        MemfitError: as the sources raise it.
    """
    headers = [read_gguf(part.source, part.name) for part in parts]
    names = [part.name for part in parts]
    metadata = headers[0].metadata
    _reject_other_kinds(metadata, names[0])
    for number, (header, name) in enumerate(zip(headers, names, strict=True)):
        _check_split(header, name, number, len(headers))
    tensors = _merged(headers, names)
    _check_total(metadata, len(tensors), names[0])
    return Checkpoint(
        id=id,
        source="gguf",
        config=metadata,
        config_name=names[0],
        tensors=tensors,
        file_bytes=sum(header.file_bytes for header in headers),
        header_bytes=sum(header.header_bytes for header in headers),
        shards=len(headers),
        header_sha256=tuple(
            (os.path.basename(name), header.sha256)
            for name, header in zip(names, headers, strict=True)
        ),
        skipped_files=skipped_files,
        revision=revision,
    )


def read_gguf_file(
    path: Path, *, id: str | None = None, skipped_files: tuple[SkippedFile, ...] = ()
) -> Checkpoint:
    """Return the checkpoint of a GGUF file on this machine, and of the rest of its series.

    Raises:
        CheckpointError: when a file is missing, unreadable or inconsistent.
        UnsupportedError: as `gguf_checkpoint`.
    """
    paths = [path.with_name(name) for name in series(path.name)]
    missing = [other.name for other in paths if not os.path.lexists(other)]
    if missing and len(paths) > 1:
        raise CheckpointError(
            f"{printable(path.parent)}: of {len(paths)} files of the series, {len(missing)} are"
            f" missing: {list_some(missing)}; fetch them first"
        )
    with ExitStack() as stack:
        parts = [
            GgufFile(printable(other), stack.enter_context(FileSource(other))) for other in paths
        ]
        return gguf_checkpoint(parts, id=id or printable(path), skipped_files=skipped_files)


def with_projector(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return the checkpoint of a GGUF model with the tensors of its vision projector.

    Raises:
        CheckpointError: when the projector's file is missing, unreadable or inconsistent.
        UnsupportedError: when it is no projector, or the model no GGUF file.
    """
    if checkpoint.source != "gguf":
        raise UnsupportedError(f"{checkpoint.id}: a projector belongs to a GGUF file")
    name = printable(path)
    with FileSource(path) as source:
        header = read_gguf(source, name)
    if header.metadata.get("general.architecture") != "clip":
        raise UnsupportedError(f"{name}: is not a vision projector")
    own = {k: value for k, value in header.metadata.items() if k.startswith("clip.")}
    own.setdefault("clip.projector_type", "")
    return replace(
        checkpoint,
        config={**checkpoint.config, **own},
        tensors=(*(checkpoint.tensors or ()), *header.tensors),
        file_bytes=checkpoint.file_bytes + header.file_bytes,
        header_bytes=checkpoint.header_bytes + header.header_bytes,
        skipped_files=tuple(
            left for left in checkpoint.skipped_files if left.name != printable(path.name)
        ),
    )


def read_gguf_directory(directory: Path, names: Sequence[str]) -> Checkpoint:
    """Return the checkpoint of the one GGUF model in a directory, as LM Studio keeps them.

    Raises:
        CheckpointError: when the directory holds more than one model, or as `read_gguf_file`.
        UnsupportedError: as `gguf_checkpoint`.
    """
    models = gguf_models(names)
    if len(models) > 1:
        raise CheckpointError(
            f"{printable(directory)}: holds {len(models)} GGUF models, {list_some(models)};"
            " name one"
        )
    projectors = [name for name in names if _is_gguf(name) and _PROJECTOR in name.lower()]
    skipped_files = tuple(
        SkippedFile(
            printable(name),
            regular_file_bytes(directory / name),
            "a vision projector, which llama.cpp loads on request",
        )
        for name in projectors
    )
    return read_gguf_file(
        directory / models[0], id=printable(directory), skipped_files=skipped_files
    )


def gguf_models(names: Sequence[str]) -> list[str]:
    """Return the files that represent a model: the first existing file of each series."""
    found: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        if _is_gguf(name) and _PROJECTOR not in name.lower():
            split = _SPLIT.fullmatch(name)
            key = (split["stem"], split["total"]) if split else (name, "")
            found.setdefault(key, name)
    return list(found.values())


def label(name: str) -> str:
    """Return the quantisation in a file's name, or without one its name.

    >>> label("big/Qwen3-4B-UD-Q4_K_XL-00001-of-00002.gguf"), label("qwen3-4b-q8_0.gguf")
    ('UD-Q4_K_XL', 'q8_0')
    """
    found = _QUANTISATION.search(_stem(name))
    return found[1] if found else _stem(name)


def choose_model(names: Sequence[str], wanted: str, place: str) -> str:
    """Return the one file of a quantisation, the first of its series.

    Raises:
        CheckpointError: when there is none, or more than one.
    """
    models = gguf_models(names)
    wanted = wanted.lower()
    ends = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|-\d{{5}}-of-)")
    found = [name for name in models if ends.search(_path_stem(name).lower())]
    found = [name for name in found if label(name).lower() == wanted] or found
    if len(found) == 1:
        return found[0]
    labels = [label(name) for name in found or models]
    shown = nearest(wanted.upper(), labels) if not found else ""
    fault = f"{len(found)} files are" if found else "no file is"
    raise CheckpointError(
        f"{place}: {fault} {printable(wanted.upper())};"
        f" {'nearest' if shown else 'it has'}: {printable(shown) or list_some(found or labels)}"
    )


def _path_stem(name: str) -> str:
    return name[: -len(SUFFIX)]


def _stem(name: str) -> str:
    """The file's name without its suffix and its number in a series."""
    base = os.path.basename(name)
    split = _SPLIT.fullmatch(base)
    return split["stem"] if split else _path_stem(base)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(SUFFIX) and not name.startswith(".")


def _reject_other_kinds(metadata: Mapping[str, Value], name: str) -> None:
    kind = metadata.get("general.type")
    if isinstance(kind, str) and kind in _NOT_MODELS:
        raise UnsupportedError(f"{name}: {_NOT_MODELS[kind]}")
    if metadata.get("general.architecture") == "clip":
        raise UnsupportedError(f"{name}: {_NOT_MODELS['mmproj']}")


def _check_split(header: GgufHeader, name: str, number: int, total: int) -> None:
    """Hold a file's own number against its place in the series."""
    count = header.metadata.get("split.count", 1)
    own = header.metadata.get("split.no", 0)
    if total == 1 and type(count) is int and count > 1:
        raise CheckpointError(
            f"{name}: is one of {count} files of a split model; give it its name"
            " -00001-of-0000N.gguf next to the others"
        )
    if total > 1 and (count, own) != (total, number):
        raise CheckpointError(
            f"{name}: calls itself file {printable(own)} of {printable(count)}, counted from 0; it"
            f" should be {number} of {total}"
        )


def _merged(headers: Sequence[GgufHeader], names: Sequence[str]) -> tuple[Tensor, ...]:
    merged: dict[str, Tensor] = {}
    for header, name in zip(headers, names, strict=True):
        for tensor in header.tensors:
            if tensor.name in merged:
                raise CheckpointError(
                    f"{name}: tensor '{printable(tensor.name)}' is in another file too"
                )
            merged[tensor.name] = tensor
    return tuple(merged.values())


def _check_total(metadata: Mapping[str, Value], tensors: int, name: str) -> None:
    declared = metadata.get("split.tensors.count", tensors)
    if declared != tensors:
        raise CheckpointError(
            f"{name}: split.tensors.count: {printable(declared)}, but the files hold"
            f" {tensors} tensors"
        )
    if not tensors:
        raise CheckpointError(f"{name}: holds no tensors; it is a vocabulary without a model")
