"""Machines a model could run on, and the memory each gives it."""

from typing import Literal

from msgspec import Struct

Backend = Literal["metal", "cuda", "cpu"]
DeviceSource = Literal["detected", "table", "flag"]
GpuClass = Literal["p", "g", "s", "d"]
WORKING_SET = "working set"


class Device(Struct, frozen=True):
    """A machine, with its memory in bytes.

    ``gpu_class`` and ``generation`` choose MLX's scheduling and kernel rules on Metal: class
    ``p`` phone, ``g`` base, ``s`` Pro and Max, ``d`` Ultra; generation 16 as in ``applegpu_g16s``.
    On CUDA the generation is the compute capability, 89 for 8.9.
    """

    name: str
    backend: Backend
    memory_bytes: int
    working_set_bytes: int
    max_buffer_bytes: int | None
    source: DeviceSource
    gpu_class: GpuClass | None = None
    generation: int | None = None
    stock_working_set_bytes: int | None = None  # before any iogpu.wired_limit_mb
    used_by_others_bytes: int | None = None  # only when the device is this host
    budget: str = WORKING_SET  # what working_set_bytes is, in words
    note: str | None = None
    bandwidth_bytes: int | None = None  # bytes a second from memory; None: the chip is not known

    @property
    def gpu(self) -> tuple[Backend, GpuClass | None, int | None]:
        """What MLX's rules depend on."""
        return self.backend, self.gpu_class, self.generation
