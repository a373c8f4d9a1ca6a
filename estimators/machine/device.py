"""Machines a model could run on, and the memory each gives it."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.units import Bytes, Count, Positive

Backend = Literal["metal", "cuda", "cpu"]
DeviceSource = Literal["detected", "table", "flag"]
GpuClass = Literal["p", "g", "s", "d"]
WORKING_SET = "working set"
FREE_NOW = "memory free now"
PROCESS_BYTES = 2**29
"""What a process takes outside of MLX's allocator: Python, the libraries and a tokenizer, some
hundred megabytes."""


class KnownDevice(Struct, frozen=True):
    """A machine, with its memory in bytes."""

    name: str
    backend: Backend
    memory_bytes: Positive
    working_set_bytes: Positive
    max_buffer_bytes: Positive | None
    source: DeviceSource
    gpu_class: GpuClass | None = None
    """Of Metal: ``p`` phone, ``g`` base, ``s`` Pro and Max, ``d`` Ultra."""
    generation: Count | None = None
    """On Metal 16 as in ``applegpu_g16s``; on CUDA the compute capability, 89 for 8.9."""
    stock_working_set_bytes: Bytes | None = None
    """Before any ``iogpu.wired_limit_mb``."""
    used_by_others_bytes: Bytes | None = None
    """Where the device is this host."""
    note: str | None = None
    bandwidth_bytes: Bytes | None = None
    """Bytes a second from memory; None where the chip is not known."""
    has_host: bool = False
    """Whether the host has a memory of its own, as beside an NVIDIA card."""
    host_memory_bytes: Bytes | None = None
    """That memory; None where there is none, or its size is not known."""

    @property
    def gpu(self) -> tuple[Backend, GpuClass | None, int | None]:
        """What MLX's rules depend on."""
        return self.backend, self.gpu_class, self.generation


class Device(KnownDevice, frozen=True):
    """A machine with the limit that it is used with."""

    budget: str = WORKING_SET
    """What ``working_set_bytes`` is, in words."""


def free_bytes(device: KnownDevice) -> int:
    """Return the free memory of a device now; all of it when its use is not known."""
    return max(0, device.memory_bytes - (device.used_by_others_bytes or 0))


def as_it_is_now(device: Device) -> Device:
    """Return this machine with what is free of it, less `PROCESS_BYTES`, where that is less."""
    left = free_bytes(device) - PROCESS_BYTES
    if left >= device.working_set_bytes:
        return device
    return replace(device, working_set_bytes=max(1, left), budget=FREE_NOW)


UNKNOWN_GPU: GpuClass = "s"
"""Of a Mac of unknown chip: no class gets more work at a time, so that none takes more."""
ANY_MAC = Device("any Mac", "metal", 0, 0, None, "flag", UNKNOWN_GPU)
"""In place of a device where none is named."""
ANY_CPU = Device("any CPU", "cpu", 0, 0, None, "flag")
"""Any machine, with MLX's CPU backend."""
