"""GGUF files for tests: built byte by byte, or by the gguf package; data is a hole."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple

from memfit.estimators.checkpoint.gguf.ggml_types import BY_NAME, TYPES
from memfit.estimators.checkpoint.manifest import Tensor

ALIGNMENT = 32
_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_ALLOCATIONS = Path(__file__).with_name("allocations.json")


class InMemory:
    """A byte source over bytes, which records its reads."""

    def __init__(self, content: bytes, size: int | None = None) -> None:
        self.content = content
        self.size = len(content) if size is None else size
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, count: int) -> bytes:
        assert 0 <= offset <= offset + count <= self.size
        self.reads.append((offset, count))
        return self.content[offset : offset + count].ljust(count, b"\0")


def text(value: str, order: str = "<") -> bytes:
    """Return a string as GGUF writes it."""
    content = value.encode()
    return pack(f"{order}Q", len(content)) + content


def value(item: Any, order: str = "<") -> bytes:
    if isinstance(item, bool):
        return pack(f"{order}IB", 7, item)
    if isinstance(item, int):
        return pack(f"{order}II", 4, item) if item < 2**32 else pack(f"{order}IQ", 10, item)
    if isinstance(item, float):
        return pack(f"{order}If", 6, item)
    if isinstance(item, str):
        return pack(f"{order}I", 8) + text(item, order)
    items = [value(entry, order) for entry in item]
    kind = items[0][:4] if items else pack(f"{order}I", 4)
    head = pack(f"{order}I", 9) + kind + pack(f"{order}Q", len(items))
    return head + b"".join(entry[4:] for entry in items)


def header(
    metadata: Mapping[str, Any],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    order: str = "<",
    alignment: int = ALIGNMENT,
) -> bytes:
    """Return a header, padded to where the data begins."""
    parts = [b"GGUF", pack(f"{order}IQQ", version, len(tensors), len(metadata))]
    parts += [text(key, order) + value(item, order) for key, item in metadata.items()]
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        sizes = pack(f"{order}I{len(shape)}Q", len(shape), *shape)
        parts.append(text(name, order) + sizes + pack(f"{order}IQ", _NUMBERS[dtype], offset))
        offset += nbytes + -nbytes % alignment
    content = b"".join(parts)
    return content + b"\0" * (-len(content) % alignment)


def data_bytes(tensors: Sequence[Tensor], alignment: int = ALIGNMENT) -> int:
    return sum(t.nbytes + -t.nbytes % alignment for t in tensors)


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), **form: Any
) -> Path:
    """Write a file of its real length that takes disk space only for its header."""
    content = header(metadata, tensors, **form)
    with path.open("wb") as file:
        file.write(content)
        file.truncate(len(content) + data_bytes(tensors, form.get("alignment", ALIGNMENT)))
    return path


def tensor(name: str, shape: Sequence[int], dtype: str = "F16") -> Tensor:
    """Return a tensor by ggml's shape, rows first."""
    return Tensor(name, dtype, tuple(shape), BY_NAME[dtype].nbytes(prod(shape)))


class Allocation(NamedTuple):
    """What llama.cpp allocated for a context; sizes are MiB as it logged them."""

    context: int
    sequences: int
    microbatch: int
    cache: str
    kv: list[tuple[int, int, float, float]]  # cells, layers, keys, values
    states: list[float]
    compute: float  # on the host
    output: float
    flash: bool = True
    gpu_layers: int | None = None  # None: without a GPU
    host_experts: int = 0  # layers, from the first, with their experts on the host
    gpu: float = 0.0  # the GPU's compute buffer
    batch: int = 2048
    unified: bool = False
    swa_full: bool = False
    outputs: int = 0  # n_outputs_max; 0: every token
    kv_offload: bool = True
    overrides: str = ""  # a pattern of tensors that are on the host


class Recorded(NamedTuple):
    """A model's metadata and tensors, and llama.cpp's allocations for it."""

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]
    runs: tuple[Allocation, ...]


def recorded() -> dict[str, Recorded]:
    """Return what llama.cpp b11549 logged for generated files of many architectures.

    Each file was completed until its loader took it, then contexts were made without allocating
    (`no_alloc`); the figures are those of its log lines `llama_kv_cache: size`,
    `llama_memory_recurrent: size`, `compute buffer size` and `output buffer size`, on the CPU and
    on one with a GPU.
    """
    data = json.loads(_ALLOCATIONS.read_text())
    return {
        name: Recorded(
            name,
            {"general.architecture": name, **entry["metadata"]},
            tuple(_expanded(entry["tensors"])),
            tuple(Allocation(**run) for run in entry["runs"]),
        )
        for name, entry in data.items()
    }


def _expanded(lines: Sequence[str]) -> Iterator[Tensor]:
    """Tensors of lines such as ``attn_q.weight 2048x4096 F32 @0-3,7``."""
    for line in lines:
        named, _, blocks = line.partition(" @")
        name, shape, *dtype = named.split()
        extents = [int(extent) for extent in shape.split("x")]
        for prefix in _prefixes(blocks):
            yield tensor(prefix + name, extents, *dtype)


def _prefixes(blocks: str) -> list[str]:
    if not blocks:
        return [""]
    spans = [span.partition("-") for span in blocks.split(",")]
    return [f"blk.{i}." for a, _, b in spans for i in range(int(a), int(b or a) + 1)]
