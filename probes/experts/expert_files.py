"""Read single experts from the safetensors files of a checkpoint."""

import json
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import open_regular, printable, read_exactly

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


class _Stored(NamedTuple):
    """The place of a tensor."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class ExpertFiles:
    """The tensors of a checkpoint, read an expert at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the headers; `memfit.estimators.checkpoint` has checked them before."""
        self._stored: dict[str, _Stored] = {}
        self.read_bytes = self.wait_ns = 0
        for path in sorted(directory.glob("model*.safetensors")):
            with open_regular(path) as file:
                length = int.from_bytes(read_exactly(file, _LENGTH_BYTES, path), "little")
                header = json.loads(read_exactly(file, length, path))
            for name, entry in header.items():
                if name != "__metadata__":
                    offset = _LENGTH_BYTES + length + entry["data_offsets"][0]
                    self._stored[name] = _Stored(
                        path, offset, entry["dtype"], tuple(entry["shape"])
                    )

    def has(self, name: str, shape: tuple[int, ...], dtype: Any) -> bool:
        """Whether a tensor is stored as the model has it: with this name, type and shape."""
        stored = self._stored.get(name)
        if stored is None or stored.dtype not in _DTYPES:
            return False
        return stored.shape == tuple(shape) and str(dtype).endswith(f".{_DTYPES[stored.dtype]}")

    def row(self, name: str, expert: int) -> Any:
        """Return one expert's part of a stacked tensor.

        Raises:
            CheckpointError: when the file has become shorter or cannot be read.
        """
        import mlx.core as mx

        path, offset, dtype, (count, *shape) = self._stored[name]
        kind = getattr(mx, _DTYPES[dtype])
        nbytes = kind.size
        for extent in shape:
            nbytes *= extent
        if not 0 <= expert < count:
            raise CheckpointError(f"{printable(path)}: {printable(name)}: has no expert {expert}")
        start = perf_counter_ns()
        with open_regular(path) as file:
            file.seek(offset + expert * nbytes)
            content = read_exactly(file, nbytes, path)
        self.wait_ns += perf_counter_ns() - start
        self.read_bytes += nbytes
        flat: Any = memoryview(content)
        return mx.array(flat).view(kind).reshape(shape)
