"""``memfit tune disk``: how fast one expert, one layer and one file are read from the disk."""

import json
from pathlib import Path
from statistics import median_low
from typing import Annotated

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import is_there, read_whole
from memfit.estimators.base.reading.section import json_section
from memfit.estimators.base.units import Bytes, Count, Positive, one_of
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.result import Result
from memfit.probes.disk_reads import DiskRunner, ReadTarget, ReadWay, StoredLayer, TimedRead
from memfit.probes.experiments.base import Start
from memfit.probes.process import ModelProcess
from memfit.probes.speed import rate
from memfit.probes.store import memfit_home, save

WAYS: tuple[ReadWay, ...] = ("mx.load", "pread", "mmap")
EXPERTS = (1, 2, 4, 6, 8, 12, 16)
REPEATS = 3
LEAST_FILE_BYTES = 2**28
"""A smaller file says more of the system's calls, and of the disk's own cache, than of the disk."""


class DiskRead(Struct, frozen=True, kw_only=True):
    """One part of the files, read in one way; times are medians."""

    target: Annotated[str, one_of("experts", "layer", "file")]
    experts: Count
    """How many of one tensor; 0 for a layer or a file."""
    way: Annotated[str, one_of(*WAYS)]
    nbytes: Bytes
    """What was wanted: mx.load reads the whole tensor for single experts."""
    ns: Count
    from_disk: Bytes | None
    """None where the system does not count it."""
    is_cold: bool


class DiskTuneResult(Result, frozen=True, kw_only=True, tag="memfit.tune-disk/1"):
    """The answer of ``memfit tune disk``."""

    model: str
    file_bytes: Positive
    expert_bytes: Bytes
    """Of one expert in the largest stacked tensor; 0 without one."""
    reads: tuple[DiskRead, ...]
    crossover_experts: Count | None
    """From so many experts of a tensor on mx.load is faster than mapping it; None where it never
    was, there are none, or the rate of the disk is not known."""
    bytes_per_second: Positive | None
    """Of the fastest cold read of the whole file; None where the file is small, or was not cold."""
    notes: tuple[Note, ...]


def tune_disk(model: str, *, start: Start) -> DiskTuneResult:
    """Read parts of a checkpoint's files; the rate of the disk is saved for plans of this machine.

    Raises:
        CheckpointError: when it has no tensors that MLX loads as they are stored.
        MachineError: when MLX is missing, or a file cannot be read.
    """
    with start(task="disk") as process:
        layer = process.call(DiskRunner.layer)
        counts = [count for count in EXPERTS if count <= layer.experts]
        wanted: list[tuple[ReadTarget, int]] = [("experts", count) for count in counts]
        wanted += [("layer", 0), ("file", 0)]
        reads = tuple(
            _median(process, layer, target, way, count) for target, count in wanted for way in WAYS
        )
    size = layer.path.stat().st_size
    speed, notes = _disk_rate(reads, size)
    if speed:
        save(_saved_path(), json.dumps({"bytes_per_second": speed}) + "\n")
    return DiskTuneResult(
        model=model,
        file_bytes=size,
        expert_bytes=layer.spans[0][1] // layer.experts if layer.experts else 0,
        reads=reads,
        crossover_experts=_crossover(reads, counts) if speed else None,
        bytes_per_second=speed,
        notes=tuple(notes),
    )


def _median(
    process: ModelProcess, layer: StoredLayer, target: ReadTarget, way: ReadWay, count: int
) -> DiskRead:
    found: list[TimedRead] = [
        process.call(DiskRunner.read, layer, target, way, count) for _ in range(REPEATS)
    ]
    counted = [each.from_disk for each in found if each.from_disk is not None]
    return DiskRead(
        target=target,
        experts=count,
        way=way,
        nbytes=found[0].nbytes,
        ns=median_low(each.ns for each in found),
        from_disk=median_low(counted) if counted else None,
        is_cold=all(each.is_cold for each in found),
    )


def _crossover(reads: tuple[DiskRead, ...], counts: list[int]) -> int | None:
    """The least number of experts from which on mx.load is never slower than a mapping."""
    times = {(each.experts, each.way): each.ns for each in reads if each.target == "experts"}
    found = None
    for count in reversed(counts):
        if times[count, "mx.load"] > times[count, "mmap"]:
            break
        found = count
    return found


def _disk_rate(reads: tuple[DiskRead, ...], size: int) -> tuple[int | None, list[Note]]:
    whole = [each for each in reads if each.target == "file" and each.is_cold]
    if not whole:
        text = "the system cannot forget a file: what was read may be from memory"
        return None, [Note("warning", "from-memory", text)]
    if size < LEAST_FILE_BYTES:
        text = f"a file below {LEAST_FILE_BYTES // 2**20} MiB does not show the rate of a disk"
        return None, [Note("warning", "small-file", text)]
    fastest = min(whole, key=lambda each: each.ns)
    if fastest.from_disk is not None and 10 * fastest.from_disk < 9 * size:
        text = "less than nine tenths of the file came from the disk, the rest from memory"
        return None, [Note("warning", "from-memory", text)]
    return rate(size, fastest.ns), []


def _saved_path() -> Path:
    return memfit_home() / "disk.json"


def saved_disk() -> int | None:
    """Return the rate in bytes per second that was measured here, None without one."""
    path = _saved_path()
    if not is_there(path):
        return None
    try:
        top = json_section(read_whole(path, limit=1000), path, what="the rate", max_values=10)
        return top.count("bytes_per_second", least=1, most=2**50)
    except InputError:
        return None
