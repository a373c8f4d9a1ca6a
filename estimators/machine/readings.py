"""Parsers for the output of system tools; unexpected text gives None, never an error."""

import re

from msgspec import Struct

MIB = 2**20
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
