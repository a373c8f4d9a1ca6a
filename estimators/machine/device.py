"""Machines a model could run on, and how much of a Mac's memory macOS gives to its GPU."""

import re
from enum import Enum
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import Bytes, Count, Positive, ceil_div, round_down
from memfit.estimators.machine.data.apple import WORKING_SETS

Backend = Literal["metal", "cuda", "cpu"]
DeviceSource = Literal["detected", "table", "flag"]
GpuClass = Literal["p", "g", "s", "d"]
WORKING_SET = "working set"
FREE_NOW = "memory free now"
RESERVED = "memory without the reserve"
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
    gpu_cores: Count | None = None
    """Of a Mac's GPU; None: one of those that are sold with the chip."""


def name_as_sold(name: str) -> str:
    """Return a machine's name for people, of a Mac with the memory that it is sold with.

    >>> name_as_sold("Mac with 32 GiB"), name_as_sold("m4-max-64")
    ('Mac with 32 GB', 'm4-max-64')
    """
    return re.sub(r"^(Mac with [0-9]+) GiB$", r"\1 GB", name)


def free_bytes(device: KnownDevice) -> int:
    """Return the free memory of a device now; all of it when its use is not known."""
    return max(0, device.memory_bytes - (device.used_by_others_bytes or 0))


def as_it_is_now(device: Device) -> Device:
    """Return this machine with what is free of it, less `PROCESS_BYTES`, where that is less."""
    left = free_bytes(device) - PROCESS_BYTES
    if left >= device.working_set_bytes:
        return device
    return replace(device, working_set_bytes=max(1, left), budget=FREE_NOW)


def with_reserve(device: Device, reserve_bytes: int) -> Device:
    """Return a machine of which other programs and the system need a part.

    Raises:
        InputError: when nothing is left.
    """
    left = device.memory_bytes - reserve_bytes
    if left <= 0:
        raise InputError(
            f"{setting('reserve')} {reserve_bytes}: nothing is left of {device.memory_bytes} bytes"
        )
    if left >= device.working_set_bytes:
        return device
    return replace(device, working_set_bytes=left, budget=RESERVED)


UNKNOWN_GPU: GpuClass = "s"
"""Of a Mac of unknown chip: no class gets more work at a time, so that none takes more."""
ANY_MAC = Device("any Mac", "metal", 0, 0, None, "flag", UNKNOWN_GPU)
"""In place of a device where none is named."""
ANY_CPU = Device("any CPU", "cpu", 0, 0, None, "flag")
"""Any machine, with MLX's CPU backend."""


GIB = 2**30
PAGE_BYTES = 16384


class OsRegime(str, Enum):
    """The macOS versions that share one table of recommended working sets."""

    MACOS_15 = "macos-15"
    MACOS_26 = "macos-26"


# What a Mac bought or updated since September 2025 runs; all M5 Macs run nothing older.
DEFAULT_REGIME = OsRegime.MACOS_26


class WorkingSet(Struct, frozen=True):
    """The recommended working set in bytes; ``measured`` when a machine reported exactly it."""

    bytes: int
    measured: bool


def regime_name(os_regime: OsRegime) -> str:
    """Return the macOS versions of a regime as people write them."""
    return str(WORKING_SETS[os_regime.value]["name"])


def stock_working_set(memory_bytes: int, *, os_regime: OsRegime) -> WorkingSet:
    """Return the working set macOS recommends when ``iogpu.wired_limit_mb`` is 0.

    A memory size no machine reported takes the rule of the next smaller one that did, and never
    less than that machine has. Source: machine/data/apple.py.

    >>> stock_working_set(64 * 2**30, os_regime=OsRegime.MACOS_26)
    WorkingSet(bytes=55662788608, measured=True)
    """
    table = WORKING_SETS[os_regime.value]
    by_rule = working_set_by_rule(memory_bytes, table["rules"])
    smaller = max(
        (gib * GIB for gib in table["measured_gib"] if gib * GIB <= memory_bytes), default=0
    )
    if smaller == memory_bytes:
        return WorkingSet(by_rule, measured=True)
    least = working_set_by_rule(smaller, table["rules"]) if smaller else 0
    return WorkingSet(max(least, by_rule), measured=False)


def working_set_by_rule(memory_bytes: int, rules: list[dict[str, int]]) -> int:
    """Return the result of the last rule with a reached ``from_gib``, a multiple of the page.

    A ratio is an integer over 2^24, the 32-bit float macOS multiplies with.

    >>> working_set_by_rule(24 * 2**30, [{"from_gib": 8, "ratio": 11184811}]) - 16 * 2**30
    16384
    """
    reached: Any = [rule for rule in rules if rule["from_gib"] * GIB <= memory_bytes]
    rule = reached[-1] if reached else rules[0]
    if "reserve_gib" in rule:
        return round_down(memory_bytes - rule["reserve_gib"] * GIB, PAGE_BYTES)
    pages = ceil_div(rule["ratio"] * memory_bytes, 2**24 * PAGE_BYTES)
    return min(pages * PAGE_BYTES, memory_bytes)


def stock_max_buffer(working_set_bytes: int) -> int:
    """Return the largest single allocation: 3/4 of the stock working set, down to a page.

    Exact on every machine with a published ``max_buffer_length``: 8, 16, 36, 48, 64, 128, 192
    and 256 GB.

    >>> stock_max_buffer(115448725504)
    86586540032
    """
    return round_down(working_set_bytes * 3 // 4, PAGE_BYTES)


MEBIBYTE = 2**20
_SMALLEST_MAC = 8 * GIB
LEAST_LEFT_BYTES = _SMALLEST_MAC - stock_working_set(_SMALLEST_MAC, os_regime=DEFAULT_REGIME).bytes
"""What a limit must leave the system, 2.86 GB: the least that macOS itself leaves on any Mac, one
of 8 GB."""
# github.com/ml-explore/mlx/issues/3186, github.com/ml-explore/mlx-lm/issues/883 and 1666: macOS
# panics in IOGPUMemory.cpp on M1 to M4, with long prompts or several requests at a time, also with
# memory left; without a wired limit ten of ten runs of one reporter passed. The cause is not known.
RISK = (
    "macOS resets it at restart; with too little left the system slows down or hangs, and kernel"
    " panics are reported while MLX keeps memory wired (mlx issue 3186, mlx-lm issues 883, 1666)"
)
"""What to know before the setting is changed."""


class WiredLimit(Struct, frozen=True):
    """A limit for memory that MLX keeps resident."""

    nbytes: int
    sysctl_mebibytes: int | None
    """``iogpu.wired_limit_mb`` for all that is needed, None when the working set is enough."""
    left_for_system_bytes: int
    """Memory without the limit that is set by sysctl."""


def wired_limit(needed_bytes: int, device: Device) -> WiredLimit:
    """Return the limit for the bytes that must stay resident.

    It is at most the device's working set: MLX raises an error above it (allocator.cpp,
    set_wired_limit). A sysctl value is given for a need above the working set that leaves
    the system `LEAST_LEFT_BYTES`.
    """
    sysctl = None
    most = device.memory_bytes - LEAST_LEFT_BYTES
    if (
        device.working_set_bytes < needed_bytes
        and ceil_div(needed_bytes, MEBIBYTE) * MEBIBYTE <= most
    ):
        sysctl = ceil_div(needed_bytes, MEBIBYTE)
    limit = min(needed_bytes, device.working_set_bytes)
    return WiredLimit(limit, sysctl, device.memory_bytes - (sysctl or 0) * MEBIBYTE)
