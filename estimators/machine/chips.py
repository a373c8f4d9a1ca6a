"""Apple's chips and NVIDIA's GPUs by their ids, from the tables in data/."""

import re
from functools import cache
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.machine.data.apple import CHIPS
from memfit.estimators.machine.data.nvidia import GPUS, UNIFIED_GPUS
from memfit.estimators.machine.device import (
    GIB,
    Device,
    GpuClass,
    name_as_sold,
)

_ARCHITECTURE = re.compile(r"applegpu_g([0-9]{2})([pgsd])")


_CLASSES: dict[str, GpuClass] = {"p": "p", "g": "g", "s": "s", "d": "d"}


class Chip(Struct, frozen=True):
    """One chip and tier, such as M4 Max; ``memory_gib`` lists the memory sizes it was sold with."""

    id: str
    name: str
    generation: int
    gpu_class: GpuClass
    memory_gib: tuple[int, ...]
    needs_macos_26: bool
    bandwidth_bytes: int
    """Bytes a second that its memory can deliver."""
    gpu_cores: tuple[int, int]
    """The fewest and the most of a GPU that is sold with it."""
    gpu_cores_by_gib: dict[int, int]
    """Those that are sold with a memory, where it is one number."""
    gpu_hertz: int
    """The highest clock of the GPU."""

    def cores(self, device: Device) -> tuple[int, int]:
        """Return the fewest and the most cores that the GPU of a Mac with this chip can have."""
        known = device.gpu_cores or self.gpu_cores_by_gib.get(device.memory_bytes // GIB)
        return (known, known) if known else self.gpu_cores


def chip_of(device: Device) -> Chip | None:
    """Return the chip of a Mac, None where it is not known or no Mac's."""
    own = (device.gpu_class, device.generation, device.bandwidth_bytes)
    matches = (
        chip
        for chip in chips().values()
        if own == (chip.gpu_class, chip.generation, chip.bandwidth_bytes)
    )
    return next(matches, None) if device.backend == "metal" else None


def with_gpu_cores(device: Device, cores: int) -> Device:
    """Return a Mac whose GPU has this many cores.

    Raises:
        InputError: when its chip is not known, or was never sold with more or fewer.
    """
    chip = chip_of(device)
    if chip is None:
        raise InputError(
            f"{name_as_sold(device.name)}: only a Mac of a known chip has a number of GPU cores;"
            f" {setting('device')} m4-max-64 names one"
        )
    fewest, most = chip.gpu_cores
    if not fewest <= cores <= most:
        raise InputError(f"{cores}: the GPU of an {chip.name} has {fewest} to {most} cores")
    return replace(device, gpu_cores=cores)


def chip_named(brand: str) -> Chip | None:
    """Return the chip of a Mac's name such as ``Apple M4 Max``, None for an unknown one."""
    return chips().get(brand.removeprefix("Apple ").strip().lower().replace(" ", "-"))


@cache
def chips() -> dict[str, Chip]:
    """Return every chip by its id, such as ``m4-max``, oldest first."""
    return {
        chip_id: Chip(
            chip_id,
            row["name"],
            *architecture_parts(row["architecture"]),
            tuple(row["memory_gib"]),
            row.get("needs_macos_26", False),
            prod(row["memory_bus"]) * 10**6 // 8,
            tuple(row["gpu_cores"]),
            row.get("gpu_cores_by_gib", {}),
            row["gpu_mhz"] * 10**6,
        )
        for chip_id, row in CHIPS.items()
    }


def architecture_parts(architecture: str) -> tuple[int, GpuClass]:
    """Return generation and class of a Metal architecture name; ValueError when it is not one.

    Source: mlx/backend/metal/device.cpp, Device::Device.

    >>> architecture_parts("applegpu_g16s")
    (16, 's')
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise ValueError(f"{architecture!r} is not an Apple GPU architecture")
    return int(match[1]), _CLASSES[match[2]]


class GpuModel(Struct, frozen=True):
    """A GPU as sold; ``compute_capability`` has major and minor in one number, 89 for 8.9."""

    id: str
    name: str
    memory_bytes: int
    compute_capability: int
    unified_memory: bool
    bandwidth_bytes: int
    """Bytes a second that its memory can deliver."""


@cache
def gpu_models() -> dict[str, GpuModel]:
    """Return every GPU by its id, such as ``rtx-4090`` or ``h100-80``."""
    tables = (GPUS, 2**20), (UNIFIED_GPUS, 10**9)
    return {
        gpu_id: GpuModel(
            gpu_id, name, memory * unit, capability, rows is UNIFIED_GPUS, bandwidth * 10**6
        )
        for rows, unit in tables
        for gpu_id, (name, memory, capability, bandwidth) in rows.items()
    }


def listed_gpu(reported_name: str) -> GpuModel | None:
    """Return the GPU that nvidia-smi prints under this name, None when it is not listed.

    >>> [listed_gpu(name).id for name in ("NVIDIA GeForce RTX 4090", "Tesla T4")]
    ['rtx-4090', 't4']
    """
    matches = [
        model
        for model in gpu_models().values()
        if re.search(rf"\b{re.escape(model.name)}\b", reported_name, re.IGNORECASE)
    ]
    return max(matches, key=lambda model: len(model.name), default=None)
