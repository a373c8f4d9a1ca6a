"""The header of a safetensors file: what its tensors are, without reading one of them.

The format is eight bytes that hold the header's length, the header in JSON, then the data
(https://github.com/huggingface/safetensors#format). The checks are those of the reference
reader (safetensors/src/tensor.rs), so that a file cut short or put together wrongly is refused
here as it would be there.

memfit reads headers itself, as the reference reader needs whole files on disk, where a header can
come from a range of the Hub's; takes a name twice, names of any length and any number of tensors;
does not say where a file is wrong; and would be an installation of native code. It is the oracle
in tests/checkpoint/test_safetensors_oracle.py.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path, PurePath
from typing import Any

from msgspec import Struct

from memfit.estimators.base.dtypes import BITS
from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import open_regular, printable, read_exactly, reject_lfs_pointer
from memfit.estimators.base.reading.json_members import object_members
from memfit.estimators.checkpoint.manifest import Tensor

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of the reference reader
MAX_TENSORS = 75_000  # in one file; DeepSeek-V3 has 91,991 in 163 files
MAX_VALUES = 13 * MAX_TENSORS
MAX_NAME_BYTES = 192  # the longest in use have half as many
MAX_DIMENSIONS = 64
MAX_EXTENT = 2**63 - 1
_METADATA = "__metadata__"


class Header(Struct, frozen=True):
    """What a safetensors file says of itself."""

    tensors: tuple[Tensor, ...]  # in the order of the header
    header_bytes: int  # with the eight bytes of its length: all that was read
    file_bytes: int
    metadata: Mapping[str, str]
    sha256: str  # of those header bytes, hexadecimal


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file, reading no byte beyond it.

    Raises:
        CheckpointError: when the file cannot be read, or its header is not what the format asks
            for: a length beyond the file or ``MAX_HEADER_BYTES``, JSON that is not an object or
            repeats a name, an unknown dtype, an invalid shape, offsets that disagree with
            dtype and shape, overlap, leave a hole or do not end where the file ends.
    """
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if file_bytes < LENGTH_BYTES:
            raise CheckpointError(
                f"{printable(path)}: {file_bytes} bytes is not a safetensors file"
            )
        first_bytes = read_exactly(file, LENGTH_BYTES, path)
        header_bytes = checked_header_bytes(first_bytes, file_bytes, path)
        text = read_exactly(file, header_bytes - LENGTH_BYTES, path)
    return parse_header(first_bytes, text, file_bytes, path)


def parse_header(first_bytes: bytes, text: bytes, file_bytes: int, path: PurePath) -> Header:
    """Return the header with length ``first_bytes`` and JSON ``text``.

    Raises:
        CheckpointError: as `read_header`, naming ``path``.
    """
    place = f"{printable(path)}: the header"
    members = object_members(text, place, error=CheckpointError, max_values=MAX_VALUES)
    header_bytes = len(first_bytes) + len(text)
    metadata, tensors = _read(members, file_bytes - header_bytes, path)
    digest = hashlib.sha256(first_bytes)
    digest.update(text)
    return Header(tensors, header_bytes, file_bytes, metadata, digest.hexdigest())


def checked_header_bytes(first_bytes: bytes, file_bytes: int, path: PurePath) -> int:
    """Return how many bytes the header takes, with the eight of its length.

    Raises:
        CheckpointError: when the length is 0, beyond the file or above ``MAX_HEADER_BYTES``.
    """
    reject_lfs_pointer(first_bytes, path)
    length = int.from_bytes(first_bytes, "little")
    if length == 0:
        raise CheckpointError(f"{printable(path)}: the header's length is 0")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{printable(path)}: the header's length is {length} bytes, above the format's limit"
            f" of {MAX_HEADER_BYTES}; the file is damaged or no safetensors file"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{printable(path)}: the header should be {length} bytes, but the file has only "
            f"{file_bytes}; fetch it again"
        )
    return LENGTH_BYTES + length


def _metadata(value: Any, path: PurePath) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(type(item) is str for item in value.values()):
        raise CheckpointError(f"{printable(path)}: __metadata__ is not an object of strings")
    return value


def _read(
    members: Iterable[tuple[str, Any]], data_bytes: int, path: PurePath
) -> tuple[Mapping[str, str], tuple[Tensor, ...]]:
    """The metadata, and the tensors, which must cover the data."""
    metadata: Mapping[str, str] = {}
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    seen_metadata = False
    for name, entry in members:
        if name in tensors or (seen_metadata and name == _METADATA):
            raise CheckpointError(
                f"{printable(path)}: the header has the name '{printable(name)}' twice"
            )
        if name == _METADATA:
            metadata, seen_metadata = _metadata(entry, path), True
            continue
        if len(tensors) == MAX_TENSORS:
            raise CheckpointError(
                f"{printable(path)}: the header has more than {MAX_TENSORS} tensors"
            )
        begin, end = _offsets(entry, name, path)
        tensors[name] = _tensor(name, entry, end - begin, path)
        spans.append((begin, end, name))
    _require_cover(spans, data_bytes, path)
    return metadata, tuple(tensors.values())


def _tensor(name: str, entry: Any, nbytes: int, path: PurePath) -> Tensor:
    dtype, shape = _dtype(entry, name, path), _shape(entry, name, path)
    _check_name(name, path)
    if BITS[dtype] * prod(shape) != 8 * nbytes:
        raise CheckpointError(
            f"{_place(path, name)}: {nbytes} bytes of data_offsets disagree with "
            f"{dtype} x {printable(list(shape))}"
        )
    return Tensor(name, dtype, shape, nbytes)


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


def _check_name(name: str, path: PurePath) -> None:
    try:
        length = len(name if name.isascii() else name.encode("utf-8"))
    except UnicodeEncodeError:
        raise CheckpointError(f"{printable(path)}: a tensor's name is not valid Unicode") from None
    if length > MAX_NAME_BYTES:
        raise CheckpointError(f"{_place(path, name)}: a name above {MAX_NAME_BYTES} bytes")


def _require_cover(spans: list[tuple[int, int, str]], data_bytes: int, path: PurePath) -> None:
    """Check that begins and ends of tensors cover the data, each byte of it once.

    A header may be in another order than its data.
    """
    covered = 0
    for begin, end, name in sorted(spans):
        if begin != covered:
            fault = "overlaps the tensor" if begin < covered else "leaves a hole"
            raise CheckpointError(f"{_place(path, name)}: {fault} before it, at offset {begin}")
        covered = end
    if covered > data_bytes:
        raise CheckpointError(
            f"{printable(path)}: the data should be {covered} bytes, but the file has only"
            f" {data_bytes} of them; it was cut short, fetch it again"
        )
    if covered < data_bytes:
        raise CheckpointError(
            f"{printable(path)}: {data_bytes - covered} bytes at the end belong to no tensor"
        )


def _place(path: PurePath, name: str) -> str:
    return f"{printable(path)}: tensor '{printable(name)}'"


def _scalar(value: object) -> str:
    if isinstance(value, (str, int, float)):
        return printable(repr(value))
    return f"a {type(value).__name__}"
