"""The machine memfit runs on. Nothing here raises: what cannot be read is not known.

The parsers of system tools return None for text that they do not expect.
"""

import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.machine.chips import architecture_parts, chip_named, listed_gpu
from memfit.estimators.machine.device import Device, OsRegime
from memfit.estimators.machine.devices import (
    MIB,
    chip_device,
    cuda_working_set,
    unknown_mac,
    with_wired_limit,
)

_TIMEOUT_SECONDS = 5
_SYSCTL = ("/usr/sbin/sysctl", "hw.memsize", "machdep.cpu.brand_string", "iogpu.wired_limit_mb")
_GPU_CORES = ("/usr/sbin/ioreg", "-rd1", "-c", "AGXAccelerator")
_IOREG_LINE = r'"gpu-core-count" = ([0-9]{1,4})$'
_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)

MAX_BYTES = 2**60
_MEMINFO_LINE = r"^(MemTotal|MemAvailable|MemFree):\s+([0-9]{1,15}) kB$"
_SYSCTL_LINE = r"^([a-z0-9_.]{1,64})\s*[:=]\s*(.{1,256})$"
_VM_STAT_PAGE = r"page size of ([0-9]{1,9}) bytes"
_VM_STAT_LINE = r'^"?([A-Z][A-Za-z -]{1,64})"?:\s+([0-9]{1,15})\.?$'
_CGROUP_LINE = r"^[0-9]{1,9}:([a-z0-9_=,]{0,256}):(/[^\n]{0,4096})$"


class Memory(Struct, frozen=True):
    """Memory of a machine or a GPU in bytes; ``used_bytes`` is what is not available now."""

    total_bytes: int
    used_bytes: int | None


class Gpu(Struct, frozen=True):
    """A row of nvidia-smi; ``memory`` is None where the GPU shares the system's."""

    name: str
    memory: Memory | None


class MacFacts(Struct, frozen=True):
    """A Mac by its sysctl values; ``wired_limit_mebibytes`` 0 is stock."""

    memory_bytes: int
    brand: str
    wired_limit_mebibytes: int


def parse_meminfo(text: str) -> Memory | None:
    """Return the memory in ``/proc/meminfo``; its kB are 1024 bytes (proc_meminfo(5))."""
    values = {name: int(kib) * 1024 for name, kib in re.findall(_MEMINFO_LINE, text, re.MULTILINE)}
    total = _sane(values.get("MemTotal"))
    if not total:
        return None
    available = values.get("MemAvailable", values.get("MemFree"))
    return Memory(total, None if available is None else max(0, total - available))


def parse_vm_stat(text: str) -> int | None:
    """Return the bytes in use in the text of macOS ``vm_stat``, as Activity Monitor counts them.

    Anonymous pages that are not purgeable, wired pages and those the compressor occupies; file
    pages can be reclaimed.
    """
    page = re.search(_VM_STAT_PAGE, text)
    pages = {name: int(count) for name, count in re.findall(_VM_STAT_LINE, text, re.MULTILINE)}
    try:
        used = (
            pages["Anonymous pages"]
            - pages["Pages purgeable"]
            + pages["Pages wired down"]
            + pages["Pages occupied by compressor"]
        )
    except KeyError:
        return None
    return _sane(max(0, used) * int(page[1])) if page else None


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...] | None:
    """Return the GPUs of ``--query-gpu=name,memory.total,memory.used
    --format=csv,noheader,nounits``; its sizes are MiB."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) == 3 and fields[0] and len(fields[0]) <= 256:
            total, used = map(_mebibytes, fields[1:])
            gpus.append(Gpu(fields[0], Memory(total, used) if total else None))
    return tuple(gpus) or None


def parse_ioreg(text: str) -> int | None:
    """Return the cores of the GPU in ``ioreg -rd1 -c AGXAccelerator``.

    >>> parse_ioreg('    | {\\n  "gpu-core-count" = 40\\n')
    40
    """
    match = re.search(_IOREG_LINE, text, re.MULTILINE)
    return int(match[1]) if match else None


def parse_sysctl(text: str) -> MacFacts | None:
    """Return the Mac in ``sysctl hw.memsize machdep.cpu.brand_string iogpu.wired_limit_mb``.

    A system without the last one has nothing to set: 0.
    """
    values = dict(re.findall(_SYSCTL_LINE, text, re.MULTILINE))
    memory = _sane(_whole(values.get("hw.memsize", "")))
    brand = values.get("machdep.cpu.brand_string", "").strip()
    limit = _whole(values.get("iogpu.wired_limit_mb", "")) or 0
    if not memory or not brand:
        return None
    # A limit beyond the memory cannot be meant; stock is what then holds at least.
    return MacFacts(memory, brand, limit if limit * MIB <= memory else 0)


def parse_cgroup(text: str) -> tuple[str, ...]:
    """Return the files that may limit the memory of the process of a ``/proc/<pid>/cgroup``.

    Version 2 has one line ``0::/path``, version 1 one with the ``memory`` controller; every
    parent's limit holds too, and inside a container the own group is seen as the root.
    """
    files = []
    for controllers, path in re.findall(_CGROUP_LINE, text, re.MULTILINE):
        base, name = "/sys/fs/cgroup", "memory.max"
        if controllers:
            base, name = f"{base}/memory", "memory.limit_in_bytes"
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            files.append("/".join([base, *parts[:depth], name]))
    return tuple(files)


def parse_cgroup_limit(text: str) -> int | None:
    """Return the bytes of a cgroup's limit, None when it is ``max`` or beyond all memory."""
    return _sane(_whole(text))


def _mebibytes(text: str) -> int | None:
    value = _whole(text)
    return None if value is None else _sane(value * MIB)


def _whole(text: str) -> int | None:
    stripped = text.strip()
    return int(stripped) if re.fullmatch(r"[0-9]{1,20}", stripped) else None


def _sane(value: int | None) -> int | None:
    return value if value is not None and value <= MAX_BYTES else None


def detect_host(*, with_gpu: bool = True) -> Device | None:
    """Return this machine: its GPU where MLX could use one, else its memory; None if unknown.

    Without a GPU it is the machine as MLX's CPU backend sees it.
    """
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        mac = _detect_mac()
        if with_gpu or mac is None:
            return mac
        return _cpu(f"{mac.name} CPU", mac.memory_bytes, mac.used_by_others_bytes)
    if platform.system() == "Linux":
        return _detect_linux(with_gpu=with_gpu)
    return None


def mac_from(facts: MacFacts, macos_version: str) -> Device:
    """Return the Mac of these facts from the tables, with the wired limit it has set."""
    chip = chip_named(facts.brand)
    major = macos_version.partition(".")[0]
    regime = OsRegime.MACOS_26 if major.isdecimal() and int(major) >= 26 else OsRegime.MACOS_15
    if chip:
        device = chip_device(chip, facts.memory_bytes, os_regime=regime, source="detected")
    else:
        device = unknown_mac(facts.memory_bytes, os_regime=regime, source="detected")
    return with_wired_limit(replace(device, name=facts.brand), facts.wired_limit_mebibytes)


def with_live_values(device: Device, info: dict[str, Any]) -> Device:
    """Return the device with what ``mx.device_info()`` says in place of the tables' values."""
    working_set = info.get("max_recommended_working_set_size")
    largest = info.get("max_buffer_length")
    if not isinstance(working_set, int) or not isinstance(largest, int):
        return device
    device = replace(
        device,
        working_set_bytes=working_set,
        max_buffer_bytes=largest,
        note="live values of mx.device_info",
    )
    try:
        generation, gpu_class = architecture_parts(str(info.get("architecture")))
    except ValueError:
        return device
    return replace(device, generation=generation, gpu_class=gpu_class)


def linux_from(memory: Memory, cgroup_limit: int | None, gpus: tuple[Gpu, ...] | None) -> Device:
    """Return the first GPU, or the memory that the machine or its container has.

    In a container with a limit, memory used by others is unknown: its counter includes page cache.
    """
    contained = cgroup_limit is not None and cgroup_limit < memory.total_bytes
    total = min(memory.total_bytes, cgroup_limit or memory.total_bytes)
    system = Memory(total, None if contained else memory.used_bytes)
    if gpus:
        return _cuda_from(gpus, system)
    name, note = f"{platform.machine()} CPU", "the container's limit" if contained else None
    return _cpu(name, total, system.used_bytes, note)


def _cpu(name: str, memory_bytes: int, used_bytes: int | None, note: str | None = None) -> Device:
    """One memory, and no limit but its size."""
    return Device(
        name=name,
        backend="cpu",
        memory_bytes=memory_bytes,
        working_set_bytes=memory_bytes,
        max_buffer_bytes=None,
        source="detected",
        used_by_others_bytes=used_bytes,
        note=note,
    )


def _cuda_from(gpus: tuple[Gpu, ...], system: Memory) -> Device:
    gpu = gpus[0]
    memory, listed = gpu.memory or system, listed_gpu(gpu.name)
    notes = [] if gpu.memory else ["shares its memory with the system"]
    if len(gpus) > 1:
        notes.append(f"the first of {len(gpus)} GPUs; MLX runs a model on one")
    return Device(
        name=gpu.name,
        backend="cuda",
        memory_bytes=memory.total_bytes,
        working_set_bytes=cuda_working_set(memory.total_bytes),
        max_buffer_bytes=None,
        source="detected",
        generation=listed.compute_capability if listed else None,
        bandwidth_bytes=listed.bandwidth_bytes if listed else None,
        used_by_others_bytes=memory.used_bytes,
        note="; ".join(notes) or None,
        has_host=gpu.memory is not None,
        host_memory_bytes=system.total_bytes if gpu.memory else None,
    )


def _detect_mac() -> Device | None:
    facts = parse_sysctl(_output(_SYSCTL))
    if facts is None:
        return None
    device = with_live_values(mac_from(facts, platform.mac_ver()[0]), _device_info())
    return replace(
        device,
        used_by_others_bytes=parse_vm_stat(_output(("/usr/bin/vm_stat",))),
        gpu_cores=parse_ioreg(_output(_GPU_CORES)),
    )


def _detect_linux(*, with_gpu: bool) -> Device | None:
    memory = parse_meminfo(_contents("/proc/meminfo"))
    if memory is None:
        return None
    limits = map(parse_cgroup_limit, map(_contents, parse_cgroup(_contents("/proc/self/cgroup"))))
    limit = min((limit for limit in limits if limit), default=None)
    has_gpu = with_gpu and shutil.which(_NVIDIA_SMI[0])
    gpus = parse_nvidia_smi(_output(_NVIDIA_SMI)) if has_gpu else None
    return linux_from(memory, limit, gpus)


def _device_info() -> dict[str, Any]:
    try:
        import mlx.core as mx

        read: Callable[[], dict[str, Any]] = mx.device_info
        return read()
    except Exception:  # noqa: BLE001 - whatever MLX fails with, the tables still hold
        return {}


def _output(command: tuple[str, ...]) -> str:
    import subprocess  # not at the top: a machine without a GPU needs none

    try:
        # sysctl fails when one name is unknown, yet prints the others: the code is not looked at.
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def _contents(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
