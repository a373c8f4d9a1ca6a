"""The header of a GGUF file: metadata and tensor table, without reading a tensor.

The format is docs/gguf.md of https://github.com/ggml-org/ggml; the checks are those of llama.cpp's
reader (ggml/src/gguf.cpp, commit 0c1e57098), so that a file cut short or put together wrongly is
refused here as it would be there.
"""

from collections.abc import Mapping
from math import prod
from struct import Struct
from typing import NamedTuple

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import round_up
from memfit.estimators.checkpoint.byte_source import ByteSource
from memfit.estimators.checkpoint.gguf.cursor import Cursor
from memfit.estimators.checkpoint.gguf.ggml_types import REMOVED, TYPES
from memfit.estimators.checkpoint.manifest import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_KEYS = 1000  # files in use have some sixty
MAX_KEY_BYTES = 65_535  # docs/gguf.md
MAX_TENSORS = 75_000
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 63  # GGML_MAX_NAME less its final zero
MAX_EXTENT = 2**63 - 1
# What is kept: more than any key that memory follows from. The rest is passed over.
MAX_KEPT_STRING_BYTES = 4096
MAX_KEPT_ELEMENTS = 512  # LLAMA_MAX_LAYERS

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


class Elided(NamedTuple):
    """A skipped value: the number of elements of an array, or of bytes of a string."""

    length: int


Value = int | float | bool | str | list[int] | list[float] | list[bool] | Elided


class GgufHeader(NamedTuple):
    """What a GGUF file says of itself."""

    version: int
    big_endian: bool
    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]  # in the order of the table; shapes as ggml counts, rows first
    header_bytes: int
    file_bytes: int
    sha256: str  # of those header bytes, hexadecimal


def read_gguf(source: ByteSource, name: str) -> GgufHeader:
    """Return the header of a GGUF file, of version 2 or 3 and either byte order.

    ``name`` is how messages name the file.

    Raises:
        CheckpointError: when the header is invalid: truncated, a repeated or empty key, an unknown
            type or count, a shape that the blocks of its type do not divide, offsets that
            do not follow each other, or tensors beyond the end of the file.
        UnsupportedError: for a version or a type of tensor that is not described.
    """
    cursor = Cursor(source, name)
    if source.size < len(MAGIC) or cursor.take(len(MAGIC), "the magic") != MAGIC:
        raise CheckpointError(f"{name}: does not begin with GGUF; it is not a GGUF file")
    version = _version(cursor)
    tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
    _check_count(cursor, "tensors", tensor_count, MAX_TENSORS)
    _check_count(cursor, "keys", key_count, MAX_KEYS)
    metadata = _metadata(cursor, key_count)
    alignment = _alignment(cursor, metadata)
    tensors = _tensors(cursor, tensor_count, alignment, source.size)
    return GgufHeader(
        version=version,
        big_endian=cursor.byte_order == ">",
        alignment=alignment,
        metadata=metadata,
        tensors=tensors,
        header_bytes=cursor.offset,
        file_bytes=source.size,
        sha256=cursor.sha256,
    )


def _version(cursor: Cursor) -> int:
    """The version; read the wrong way round it has nothing in its lower half."""
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
        cursor.use_byte_order(">")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{cursor.name}: GGUF version {version}; versions 2 and 3 are read, convert it again"
        )
    return version


def _check_count(cursor: Cursor, what: str, count: int, most: int) -> None:
    if count > most:
        raise CheckpointError(f"{cursor.name}: {count} {what}, but at most {most} are read")


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = _name(cursor, "a key", MAX_KEY_BYTES)
        if not key:
            raise CheckpointError(f"{cursor.name}: a key is empty")
        if key in metadata:
            raise CheckpointError(f"{cursor.name}: the key '{printable(key)}' is given twice")
        metadata[key] = _value(cursor, key)
    return metadata


def _name(cursor: Cursor, what: str, most: int) -> str:
    length = cursor.u64(what)
    if length > most:
        raise CheckpointError(
            f"{cursor.name}: the name of {what} has {length} bytes, above the limit of {most}"
        )
    try:
        return cursor.take(length, what).decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{cursor.name}: the name of {what} is not UTF-8") from None


def _value(cursor: Cursor, key: str) -> Value:
    kind = cursor.u32(key)
    if kind == _STRING:
        return _string(cursor, key)
    if kind == _ARRAY:
        return _array(cursor, key)
    values: list[int] | list[float] = _numbers(cursor, key, kind, 1)
    return values[0]


def _string(cursor: Cursor, key: str) -> str | Elided:
    length = cursor.u64(key)
    if length > MAX_KEPT_STRING_BYTES:
        cursor.pass_over(length, key)
        return Elided(length)
    # llama.cpp takes any bytes; none of them sizes anything.
    return cursor.take(length, key).decode("utf-8", "replace")


def _array(cursor: Cursor, key: str) -> Value:
    kind, count = cursor.u32(key), cursor.u64(key)
    if kind == _STRING:
        cursor.pass_over_strings(count, key)
        return Elided(count)
    if count > MAX_KEPT_ELEMENTS:
        cursor.pass_over(count * _element(cursor, key, kind).size, key)
        return Elided(count)
    return _numbers(cursor, key, kind, count)


def _numbers(cursor: Cursor, key: str, kind: int, count: int) -> list[int] | list[float]:
    element = _element(cursor, key, kind)
    data = cursor.take(count * element.size, key)
    values = [value for (value,) in element.iter_unpack(data)]
    return [value != 0 for value in values] if kind == _BOOL else values


def _element(cursor: Cursor, key: str, kind: int) -> Struct:
    code = "b" if kind == _BOOL else _NUMBERS.get(kind)
    if code is None:
        raise CheckpointError(f"{cursor.name}: {printable(key)}: {kind} is not a value type")
    return Struct(cursor.byte_order + code)


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise CheckpointError(
            f"{cursor.name}: general.alignment: expected a power of two up to {MAX_ALIGNMENT}"
        )
    return alignment


def _tensors(cursor: Cursor, count: int, alignment: int, file_bytes: int) -> tuple[Tensor, ...]:
    tensors: dict[str, Tensor] = {}
    end = padded = 0
    for _ in range(count):
        tensor = _tensor(cursor)
        offset = cursor.u64(f"tensor '{tensor.name}'")
        if tensor.name in tensors:
            raise CheckpointError(f"{_place(cursor, tensor.name)}: is in the table twice")
        if offset != padded:
            raise CheckpointError(
                f"{_place(cursor, tensor.name)}: begins at offset {offset}, where {padded} is next"
            )
        tensors[tensor.name] = tensor
        end = offset + tensor.nbytes
        padded = round_up(end, alignment)
    missing = round_up(cursor.offset, alignment) + end - file_bytes
    if end and missing > 0:
        raise CheckpointError(
            f"{cursor.name}: {missing} bytes of the last tensor are missing; it was cut short,"
            " fetch it again"
        )
    return tuple(tensors.values())


def _tensor(cursor: Cursor) -> Tensor:
    name = _name(cursor, "a tensor", MAX_NAME_BYTES)
    where = f"tensor '{name}'"
    dimensions = cursor.u32(where)
    if dimensions > MAX_DIMENSIONS:
        raise CheckpointError(f"{_place(cursor, name)}: {dimensions} dimensions, 4 are the most")
    shape = tuple(cursor.u64(where) for _ in range(dimensions))
    number = cursor.u32(where)
    kind = TYPES.get(number)
    if kind is None:
        fault = "was removed; convert the file again" if number in REMOVED else "is not described"
        raise UnsupportedError(f"{_place(cursor, name)}: ggml type {number} {fault}")
    elements = prod(shape)
    # The largest block has more bits than a byte an element: bytes stay countable as well.
    if elements > MAX_EXTENT // 8 or any(extent > MAX_EXTENT for extent in shape):
        raise CheckpointError(f"{_place(cursor, name)}: its shape {list(shape)} is beyond 2^60")
    row = shape[0] if shape else 1
    if row % kind.block:
        raise CheckpointError(
            f"{_place(cursor, name)}: rows of {row} are no multiple of the {kind.block} elements"
            f" in a block of {kind.name}"
        )
    return Tensor(name, kind.name, shape, kind.nbytes(elements))


def _place(cursor: Cursor, name: str) -> str:
    return f"{cursor.name}: tensor '{printable(name)}'"
