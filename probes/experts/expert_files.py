"""Read single experts from the safetensors files of a checkpoint."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from memfit.estimators.base import dtypes
from memfit.estimators.base.files import open_regular, read_exactly

_LENGTH_BYTES = 8
# The types that MLX loads as they are stored.
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "I8": "int8",
    "I32": "int32",
}
_NUMBER = re.compile(r"\.(\d+)\.")
_LAST_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")


class _Stored(NamedTuple):
    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def tensor_bytes(stored: _Stored) -> int:
    """Return the bytes of a tensor in its file."""
    return dtypes.nbytes(prod(stored.shape), stored.dtype)


class ExpertRows(NamedTuple):
    """Where the files may have a stacked parameter: a place for each expert, of one type."""

    name: str
    places: tuple[tuple[Path, int], ...]
    dtype: str
    shape: tuple[int, ...]
    """Of one expert."""


class ExpertFiles:
    """The tensors of a checkpoint, read an expert at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the headers; `memfit.estimators.checkpoint` has checked them before."""
        self.layers: dict[str, dict[str, _Stored]] = defaultdict(dict)
        self.read_bytes = self.wait_ns = 0
        for path in sorted(directory.glob("model*.safetensors")):
            with open_regular(path) as file:
                length = int.from_bytes(read_exactly(file, _LENGTH_BYTES, path), "little")
                header = json.loads(read_exactly(file, length, path))
            for name, entry in header.items():
                if name != "__metadata__" and entry["dtype"] in _DTYPES:
                    offset = _LENGTH_BYTES + length + entry["data_offsets"][0]
                    stored = _Stored(path, offset, entry["dtype"], tuple(entry["shape"]))
                    self.layers[_layer(name)][name] = stored

    def candidates(self, name: str, array_shape: tuple[int, ...], dtype: Any) -> list[ExpertRows]:
        """Return where the experts of a parameter may be stored, by types and shapes.

        A tensor with the parameter's own name is it. Otherwise it can be any of the same layer:
        a stacked one, a half of one with two projections, or one tensor for each expert. Only
        their values say which.
        """
        experts, *shape = array_shape
        found = [
            rows
            for rows in _all_rows(self.layers[_layer(name)], experts)
            if rows.shape == tuple(shape) and str(dtype).endswith(f".{_DTYPES[rows.dtype]}")
        ]
        return [rows for rows in found if rows.name == name] or found

    def row(self, rows: ExpertRows, expert: int) -> Any:
        """Return one expert's part of a parameter.

        Raises:
            CheckpointError: when the file has become shorter or cannot be read.
        """
        import mlx.core as mx

        kind = getattr(mx, _DTYPES[rows.dtype])
        path, offset = rows.places[expert]
        nbytes = dtypes.nbytes(prod(rows.shape), rows.dtype)
        start = perf_counter_ns()
        with open_regular(path) as file:
            file.seek(offset)
            content = read_exactly(file, nbytes, path)
        self.wait_ns += perf_counter_ns() - start
        self.read_bytes += nbytes
        flat: Any = memoryview(content)
        return mx.array(flat).view(kind).reshape(rows.shape)


def _layer(name: str) -> str:
    """The number of a tensor's layer, which is the first one in its name."""
    number = _NUMBER.search(name)
    return number[1] if number else ""


def _all_rows(tensors: Mapping[str, _Stored], experts: int) -> Iterator[ExpertRows]:
    """Yield everything in a layer that has an equal part for each expert."""
    singles: dict[str, dict[int, _Stored]] = defaultdict(dict)
    for name, stored in tensors.items():
        if stored.shape and stored.shape[0] == experts:
            yield from _parts(name, stored)
        if number := _LAST_NUMBER.search(name):
            pattern = f"{name[: number.start(1)]}*{name[number.end(1) :]}"
            singles[pattern][int(number[1])] = stored
    for pattern, found in singles.items():
        kinds = {(each.dtype, each.shape) for each in found.values()}
        if len(kinds) == 1 and found.keys() == set(range(experts)):
            places = tuple((found[n].path, found[n].offset) for n in range(experts))
            yield ExpertRows(pattern, places, *kinds.pop())


def _parts(name: str, stored: _Stored) -> Iterator[ExpertRows]:
    """Yield a stacked tensor, and the halves of its rows: gate and up projection in one."""
    path, offset, dtype, (experts, *shape) = stored
    row = dtypes.nbytes(prod(shape), dtype)
    for parts in (1, 2):
        if parts == 1 or (shape and shape[0] % parts == 0):
            size = row // parts
            less = (shape[0] // parts, *shape[1:]) if shape else ()
            for part in range(parts):
                starts = (offset + expert * row + part * size for expert in range(experts))
                yield ExpertRows(name, tuple((path, start) for start in starts), dtype, less)
