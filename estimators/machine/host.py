"""The machine memfit runs on. Nothing here raises: what cannot be read is not known."""

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memfit.estimators.machine.apple import architecture_parts, chips
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import chip_device, unknown_mac, with_wired_limit
from memfit.estimators.machine.nvidia import cuda_working_set, listed_gpu
from memfit.estimators.machine.readings import (
    Gpu,
    MacFacts,
    Memory,
    parse_cgroup,
    parse_cgroup_limit,
    parse_meminfo,
    parse_nvidia_smi,
    parse_sysctl,
    parse_vm_stat,
)
from memfit.estimators.machine.working_set import OsRegime

_TIMEOUT_SECONDS = 5
_SYSCTL = ("/usr/sbin/sysctl", "hw.memsize", "machdep.cpu.brand_string", "iogpu.wired_limit_mb")
_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)


def detect_host(*, with_gpu: bool = True) -> Device | None:
    """Return this machine: its GPU where MLX could use one, else its memory; None if unknown.

    Without a GPU it is the machine as MLX's CPU backend sees it.
    """
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        mac = _detect_mac()
        return mac if with_gpu or mac is None else _cpu_of(mac)
    if platform.system() == "Linux":
        return _detect_linux(with_gpu=with_gpu)
    return None


def mac_from(facts: MacFacts, macos_version: str) -> Device:
    """Return the Mac of these facts from the tables, with the wired limit it has set."""
    chip = chips().get(facts.brand.removeprefix("Apple ").strip().lower().replace(" ", "-"))
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
    return Device(
        name=f"{platform.machine()} CPU",
        backend="cpu",
        memory_bytes=total,
        working_set_bytes=total,
        max_buffer_bytes=None,
        source="detected",
        used_by_others_bytes=system.used_bytes,
        note="the container's limit" if contained else None,
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
    return replace(device, used_by_others_bytes=parse_vm_stat(_output(("/usr/bin/vm_stat",))))


def _cpu_of(mac: Device) -> Device:
    """One memory, and no limit but its size."""
    return Device(
        name=f"{mac.name} CPU",
        backend="cpu",
        memory_bytes=mac.memory_bytes,
        working_set_bytes=mac.memory_bytes,
        max_buffer_bytes=None,
        source="detected",
        used_by_others_bytes=mac.used_by_others_bytes,
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
