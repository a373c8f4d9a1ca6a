"""How much of a Mac's memory macOS recommends to its GPU, and the limit that can be set."""

from enum import Enum
from typing import Any

from msgspec import Struct

from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.machine.data.apple import WORKING_SETS
from memfit.estimators.machine.device import Device

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
    reported: dict[int, int] = table["bytes"]
    whole_gib, rest = divmod(memory_bytes, GIB)
    if not rest and whole_gib in reported:
        return WorkingSet(reported[whole_gib], measured=True)
    smaller = max((size for gib, size in reported.items() if gib <= whole_gib), default=0)
    return WorkingSet(max(smaller, working_set_by_rule(memory_bytes, table["rules"])), False)


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
