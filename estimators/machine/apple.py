"""Apple's chips: their GPU's architecture as MLX reads it, and the memory they were sold with."""

import re
from functools import cache
from math import prod

from msgspec import Struct

from memfit.estimators.machine.data.apple import CHIPS
from memfit.estimators.machine.device import GpuClass

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
