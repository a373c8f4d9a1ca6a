"""Checkpoints of real size on disk for tests: a real header, then a hole instead of the data."""

import json
from collections.abc import Mapping
from pathlib import Path

from memfit.estimators.base.dtypes import nbytes

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def header_of(tensors: Shapes, metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """Return the JSON of a safetensors header and the bytes of data that it describes."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for extent in shape:
            elements *= extent
        start, end = end, end + nbytes(elements, dtype)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), end


def write_safetensors(
    path: Path, tensors: Shapes, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file of its real length that takes disk space only for its header."""
    header, data_bytes = header_of(tensors, metadata)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data_bytes)


def write_adapter(directory: Path) -> Path:
    """Write an adapter of Qwen3-4B of rank 64, and return its directory."""
    path = "model.layers.{}.mlp.down_proj.lora_{}"
    shapes: Shapes = {
        path.format(layer, name): ("F32", shape)
        for layer in range(36)
        for name, shape in {"a": (9728, 64), "b": (64, 2560)}.items()
    }
    write_safetensors(directory / "adapters.safetensors", shapes)
    (directory / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    return directory
