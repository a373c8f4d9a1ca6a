"""The header of a safetensors file: what its tensors are, without reading one of them.

The format is eight bytes that hold the header's length, the header in JSON, then the data
(https://github.com/huggingface/safetensors#format). The checks are those of the reference
reader (safetensors/src/tensor.rs), so that a file cut short or put together wrongly is refused
here as it would be there.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from memfit.estimators.checkpoint.files import (
    open_regular,
    read_exactly,
    refuse_lfs_pointer,
    shown,
)
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.checkpoint.strict_json import parse_object
from memfit.estimators.dtypes import BITS
from memfit.estimators.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of the reference reader
MAX_VALUES = 6_000_000  # about a dozen a tensor: 500,000 tensors in one file
MAX_DIMENSIONS = 64
MAX_EXTENT = 2**63 - 1


class Header(NamedTuple):
    """What a safetensors file says of itself."""

    tensors: tuple[Tensor, ...]  # in the order of the header
    header_bytes: int  # with the eight bytes of its length: all that was read
    file_bytes: int
    metadata: Mapping[str, str]
    sha256: str  # of those header bytes, hexadecimal


class _Span(NamedTuple):
    """Where a tensor lies in the data; sorted spans must follow each other."""

    begin: int
    end: int
    name: str


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file, reading no byte beyond it.

    Raises:
        CheckpointError: when the file cannot be read, or its header is not what the format asks
            for: a length beyond the file or ``MAX_HEADER_BYTES``, JSON that is no object or
            repeats a name, an unknown dtype, a shape that is none, offsets that disagree with
            dtype and shape, overlap, leave a hole or do not end where the file ends.
    """
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if file_bytes < LENGTH_BYTES:
            raise CheckpointError(f"{shown(path)}: {file_bytes} bytes is no safetensors file")
        first_bytes = read_exactly(file, LENGTH_BYTES, path)
        header_bytes = checked_header_bytes(first_bytes, file_bytes, path)
        text = read_exactly(file, header_bytes - LENGTH_BYTES, path)
    return parse_header(first_bytes, text, file_bytes, path)


def parse_header(first_bytes: bytes, text: bytes, file_bytes: int, path: PurePath) -> Header:
    """Return the header whose length is ``first_bytes`` and whose JSON is ``text``.

    Raises:
        CheckpointError: as `read_header`, naming ``path``.
    """
    entries = parse_object(
        text, path, what="the header", error=CheckpointError, max_values=MAX_VALUES
    )
    metadata = _metadata(entries.pop("__metadata__", None), path)
    header_bytes = len(first_bytes) + len(text)
    tensors = _tensors(entries, file_bytes - header_bytes, path)
    digest = hashlib.sha256(first_bytes)
    digest.update(text)
    return Header(tensors, header_bytes, file_bytes, metadata, digest.hexdigest())


def checked_header_bytes(first_bytes: bytes, file_bytes: int, path: PurePath) -> int:
    """Return how many bytes the header takes, with the eight of its length.

    Raises:
        CheckpointError: when the length is 0, beyond the file or above ``MAX_HEADER_BYTES``.
    """
    refuse_lfs_pointer(first_bytes, path)
    length = int.from_bytes(first_bytes, "little")
    if length == 0:
        raise CheckpointError(f"{shown(path)}: the header's length is 0")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{shown(path)}: the header's length is {length} bytes, above the format's limit of "
            f"{MAX_HEADER_BYTES}; the file is damaged or no safetensors file"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{shown(path)}: the header should be {length} bytes, but the file has only "
            f"{file_bytes}; fetch it again"
        )
    return LENGTH_BYTES + length


def _metadata(value: Any, path: PurePath) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(type(item) is str for item in value.values()):
        raise CheckpointError(f"{shown(path)}: __metadata__ is not an object of strings")
    return value


def _tensors(entries: Mapping[str, Any], data_bytes: int, path: PurePath) -> tuple[Tensor, ...]:
    tensors = []
    spans = []
    for name, entry in entries.items():
        begin, end = _offsets(entry, name, path)
        dtype, shape = _dtype(entry, name, path), _shape(entry, name, path)
        bits = BITS[dtype]
        for extent in shape:
            bits *= extent
        if bits != 8 * (end - begin):
            raise CheckpointError(
                f"{_place(path, name)}: {end - begin} bytes of data_offsets disagree with "
                f"{dtype} x {shown(list(shape))}"
            )
        tensors.append(Tensor(name, dtype, shape, end - begin))
        spans.append(_Span(begin, end, name))
    _check_names(entries, path)
    _check_cover(spans, data_bytes, path)
    return tuple(tensors)


def _offsets(entry: Any, name: str, path: PurePath) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if type(entry) is dict else None
    if type(offsets) is list and len(offsets) == 2:
        begin, end = offsets
        if type(begin) is int and type(end) is int and 0 <= begin <= end <= MAX_EXTENT:
            return begin, end
    if type(entry) is not dict:
        raise CheckpointError(f"{_place(path, name)}: is not an object")
    raise CheckpointError(f"{_place(path, name)}: data_offsets are not two ascending offsets")


def _dtype(entry: Mapping[str, Any], name: str, path: PurePath) -> str:
    dtype = entry.get("dtype")
    if type(dtype) is not str or dtype not in BITS:
        raise CheckpointError(f"{_place(path, name)}: unknown dtype {_scalar(dtype)}")
    return sys.intern(dtype)


def _shape(entry: Mapping[str, Any], name: str, path: PurePath) -> tuple[int, ...]:
    shape = entry.get("shape")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{_place(path, name)}: shape is not a list of dimensions")
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_EXTENT:
            raise CheckpointError(
                f"{_place(path, name)}: shape has {_scalar(extent)} where a dimension belongs"
            )
    return tuple(shape)


def _check_names(names: Mapping[str, Any], path: PurePath) -> None:
    try:
        "".join(names).encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{shown(path)}: a tensor's name is not valid Unicode") from None


def _check_cover(spans: list[_Span], data_bytes: int, path: PurePath) -> None:
    spans.sort()
    covered = 0
    for begin, end, name in spans:
        if begin != covered:
            fault = (
                "overlaps the tensor before it" if begin < covered else "leaves a hole before it"
            )
            raise CheckpointError(f"{_place(path, name)}: {fault}, at offset {begin}")
        covered = end
    if covered > data_bytes:
        raise CheckpointError(
            f"{shown(path)}: the data should be {covered} bytes, but the file has only "
            f"{data_bytes} of them; it was cut short, fetch it again"
        )
    if covered < data_bytes:
        raise CheckpointError(
            f"{shown(path)}: {data_bytes - covered} bytes at the end belong to no tensor"
        )


def _place(path: PurePath, name: str) -> str:
    return f"{shown(path)}: tensor '{shown(name)}'"


def _scalar(value: object) -> str:
    if isinstance(value, (str, int, float)):
        return shown(repr(value))
    return f"a {type(value).__name__}"
