"""Timed reads of a checkpoint's files in several ways: the child's part of ``memfit tune disk``."""

import mmap
import os
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal

from msgspec import Struct

from memfit.estimators.base.errors import CheckpointError, MachineError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import Bytes, Count
from memfit.probes.experts.expert_files import ExpertFiles, tensor_bytes
from memfit.probes.loading import memory_errors
from memfit.probes.model_runner import ModelRunner
from memfit.probes.prompt_caches.stored import drop_from_page_cache

ReadWay = Literal["mx.load", "pread", "mmap"]
ReadTarget = Literal["experts", "layer", "file"]
_F_NOCACHE = 48
"""sys/fcntl.h of macOS: reads of this descriptor leave nothing in the page cache."""
_PART_BYTES = 2**24


class StoredLayer(Struct, frozen=True):
    """Where one layer's largest tensor is, and all others of the layer in the same file."""

    path: Path
    names: tuple[str, ...]
    """The stacked experts first, where there are any."""
    spans: tuple[tuple[Count, Count], ...]
    """Of each the offset and the bytes."""
    experts: Count
    """In the first tensor; 0 where it has none for single experts."""


class TimedRead(Struct, frozen=True):
    nbytes: Bytes
    ns: Count
    from_disk: Bytes | None
    """Bytes that came from the disk, None where the system does not count them."""
    is_cold: bool
    """Whether the system was made to read them from the disk."""


class DiskRunner(ModelRunner):
    """Reads parts of the files, each cold where the system allows it."""

    def layer(self) -> StoredLayer:
        """Return the layer with the largest tensor of the checkpoint.

        Raises:
            CheckpointError: when no file has a tensor that MLX loads as it is stored.
        """
        layers = ExpertFiles(self.path).layers
        every = [
            (tensor_bytes(each), number)
            for number, found in layers.items()
            for each in found.values()
        ]
        if not every:
            raise CheckpointError(f"{printable(self.path)}: has no tensor as MLX loads it")
        found = sorted(layers[max(every)[1]].items(), key=lambda each: -tensor_bytes(each[1]))
        largest = found[0][1]
        own = [(name, each) for name, each in found if each.path == largest.path]
        return StoredLayer(
            largest.path,
            tuple(name for name, _ in own),
            tuple((each.offset, tensor_bytes(each)) for _, each in own),
            largest.shape[0] if len(largest.shape) > 2 else 0,
        )

    def read(self, layer: StoredLayer, target: ReadTarget, way: ReadWay, experts: int) -> TimedRead:
        """Read experts of the layer's first tensor, the layer, or its whole file."""
        spans, chosen = list(layer.spans), _spread(layer.experts, experts)
        if target == "experts":
            offset, nbytes = layer.spans[0]
            row = nbytes // layer.experts
            spans = [(offset + expert * row, row) for expert in chosen]
        elif target == "file":
            size = layer.path.stat().st_size
            spans = [(at, min(_PART_BYTES, size - at)) for at in range(0, size, _PART_BYTES)]
        is_cold = drop_from_page_cache(layer.path) or (sys.platform == "darwin" and way == "pread")
        before, start = _disk_bytes(), perf_counter_ns()
        try:
            with memory_errors():
                if way == "mx.load":
                    _by_load(layer, target, chosen)
                else:
                    _by_spans(layer.path, spans, way)
        except OSError as error:
            raise MachineError(f"{printable(layer.path)}: {error.strerror}") from None
        ns, after = perf_counter_ns() - start, _disk_bytes()
        counted = after - before if before is not None and after is not None else None
        return TimedRead(sum(size for _, size in spans), ns, counted, is_cold)


def _spread(experts: int, count: int) -> list[int]:
    """Experts that are not next to each other, as a router chooses them."""
    return [index * experts // count for index in range(count)] if experts and count else []


def _by_load(layer: StoredLayer, target: ReadTarget, chosen: list[int]) -> None:
    import mlx.core as mx

    arrays: Any = mx.load(str(layer.path))
    if target == "experts":
        mx.eval(arrays[layer.names[0]][mx.array(chosen)])
        return
    for name in list(arrays) if target == "file" else layer.names:
        mx.eval(arrays.pop(name))
        mx.clear_cache()


def _by_spans(path: Path, spans: list[tuple[int, int]], way: ReadWay) -> None:
    import mlx.core as mx

    handle = os.open(path, os.O_RDONLY)
    try:
        if way == "mmap":
            with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as mapped:
                for offset, nbytes in spans:
                    part: Any = memoryview(mapped[offset : offset + nbytes])
                    mx.eval(mx.array(part))
            return
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(handle, _F_NOCACHE, 1)
        for offset, nbytes in spans:
            content: Any = memoryview(_pread(handle, offset, nbytes))
            mx.eval(mx.array(content))
    finally:
        os.close(handle)


def _pread(handle: int, offset: int, nbytes: int) -> bytes:
    parts = []
    while nbytes and (part := os.pread(handle, nbytes, offset)):
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return b"".join(parts)


def _disk_bytes() -> int | None:
    """Return what this process has read from the disk (proc_pid_io(5)), None where unknown."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
