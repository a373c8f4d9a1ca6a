"""Machines by name, by memory and by working set: Apple's chips and NVIDIA's GPUs."""

import re
from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.nearest import nearest
from memfit.estimators.machine.chips import Chip, GpuModel, chips, gpu_models
from memfit.estimators.machine.data.apple import WORKING_SETS
from memfit.estimators.machine.device import (
    DEFAULT_REGIME,
    GIB,
    UNKNOWN_GPU,
    Device,
    DeviceSource,
    GpuClass,
    OsRegime,
    regime_name,
    stock_max_buffer,
    stock_working_set,
)

MIB = 2**20
# Nothing on sale comes near; beyond it a size is a slip of the unit.
MAX_MEMORY_BYTES = 2**50
MIN_MAC_BYTES = 4 * GIB
_CUDNN_CAPABILITY = 80
_LONGEST_NAME = 60


def cuda_working_set(memory_bytes: int) -> int:
    """Return what MLX's CUDA allocator lets itself use: 95 % of the GPU's memory.

    Source: mlx/backend/cuda/allocator.cpp, memory_limit_.
    """
    return memory_bytes * 95 // 100


def find_device(name: str, *, os_regime: OsRegime = DEFAULT_REGIME) -> Device:
    """Return the machine of a name such as ``m4-max-64``, ``m1-8``, ``rtx-4090`` or ``h100-80``.

    Raises:
        InputError: when no machine has that name, its chip was never sold with that memory, or
            never ran that macOS.

    >>> find_device("m4-max-64").working_set_bytes
    55662788608
    """
    given = name.strip()[:_LONGEST_NAME]
    wanted = re.sub(r"[\s_-]+", "-", given.lower())
    if wanted in gpu_models():
        return _cuda_device(gpu_models()[wanted])
    chip_id, _, memory = wanted.rpartition("-")
    chip = chips().get(chip_id)
    if chip and memory in map(str, chip.memory_gib):
        return _chip_device(chip, int(memory), os_regime)
    if chip and re.fullmatch(r"[0-9]+(gb|gib)?", memory):
        raise InputError(f"{given!r}: the {chip.name} was sold with {_sizes(chip)}")
    if wanted in chips():
        raise InputError(f"{given!r}: name its memory too, such as {_names(chips()[wanted])}")
    if maker := _other_maker(wanted):
        raise InputError(
            f"{given!r}: {maker} GPUs are not described, and MLX computes on the CPU there (on that"
            " machine: --device host); for llama.cpp give --working-set and a size below the card's"
            " memory, of which its driver takes a part"
        )
    raise InputError(f"unknown machine {given!r}; {_nearest(wanted)}")


def memory_device(memory_bytes: int, *, os_regime: OsRegime = DEFAULT_REGIME) -> Device:
    """Return a Mac with this much memory, of unknown chip; 64 x 10^9 bytes mean a 64 GB Mac.

    Raises:
        InputError: when a Mac cannot have that memory.
    """
    _check_bytes("memory", memory_bytes, MIN_MAC_BYTES)
    sold = _as_sold(memory_bytes)
    device = unknown_mac(sold, os_regime=os_regime, source="flag")
    if sold == memory_bytes:
        return device
    return _noted(device, f"a Mac sold with {sold // GIB} GB has {sold // GIB} GiB")


def working_set_device(working_set_bytes: int) -> Device:
    """Return a Mac for which only the recommended working set is known.

    Raises:
        InputError: when the size is not positive or beyond all machines.
    """
    _check_bytes("working set", working_set_bytes, 1)
    return Device(
        name="Mac with a given working set",
        backend="metal",
        memory_bytes=working_set_bytes,
        working_set_bytes=working_set_bytes,
        max_buffer_bytes=None,
        source="flag",
        gpu_class=UNKNOWN_GPU,
        note="chip, memory and largest buffer are not known; the memory is at least this",
    )


def with_wired_limit(device: Device, mebibytes: int) -> Device:
    """Return the machine after ``sysctl iogpu.wired_limit_mb=<mebibytes>``; 0 restores stock.

    The recommended working set becomes exactly that many MiB; the largest buffer stays stock
    (published: 180000 MiB set on an M2 Ultra 192 GB, github.com/ml-explore/mlx/pull/1060).

    Raises:
        InputError: when the machine has no such setting or not that much memory.
    """
    stock = device.stock_working_set_bytes
    if device.backend != "metal" or stock is None:
        raise InputError(f"{device.name}: iogpu.wired_limit_mb is a setting of Macs")
    if not 0 <= mebibytes * MIB <= device.memory_bytes:
        raise InputError(
            f"{device.name}: a wired limit of {mebibytes} MiB is not between 0 and its"
            f" {device.memory_bytes // MIB} MiB of memory"
        )
    if mebibytes == 0:
        return replace(device, working_set_bytes=stock)
    changed = replace(device, working_set_bytes=mebibytes * MIB)
    return _noted(changed, f"iogpu.wired_limit_mb={mebibytes}")


def list_devices(*, os_regime: OsRegime = DEFAULT_REGIME) -> tuple[Device, ...]:
    """Return every machine of the tables, Macs that ran the macOS first."""
    macs = (
        _chip_device(chip, gib, os_regime)
        for chip in chips().values()
        if runs(chip, os_regime)
        for gib in chip.memory_gib
    )
    return (*macs, *map(_cuda_device, gpu_models().values()))


def runs(chip: Chip, os_regime: OsRegime) -> bool:
    """Whether Macs with the chip ever ran that macOS."""
    return os_regime is OsRegime.MACOS_26 or not chip.needs_macos_26


def by_macos(device: Device) -> dict[str, int]:
    """Return the working sets of a named Mac by the macOS it runs, nothing where one is set."""
    is_stock = device.working_set_bytes == device.stock_working_set_bytes
    if device.source == "detected" or not is_stock:
        return {}
    chip = chips().get(device.name.rpartition("-")[0])
    return {
        regime_name(regime): stock_working_set(device.memory_bytes, os_regime=regime).bytes
        for regime in OsRegime
        if chip is None or runs(chip, regime)
    }


def chip_device(
    chip: Chip, memory_bytes: int, *, os_regime: OsRegime, source: DeviceSource
) -> Device:
    """Return a Mac with this chip and memory as it comes, whether or not it was sold so."""
    return replace(
        _mac(memory_bytes, os_regime, source),
        name=f"{chip.id}-{memory_bytes // GIB}",
        gpu_class=chip.gpu_class,
        generation=chip.generation,
        bandwidth_bytes=chip.bandwidth_bytes,
    )


def unknown_mac(memory_bytes: int, *, os_regime: OsRegime, source: DeviceSource) -> Device:
    """Return a Mac with this memory and an unknown chip."""
    return _noted(_mac(memory_bytes, os_regime, source), "the chip is not known")


def _gpu_class(memory_bytes: int) -> GpuClass:
    """The class of all chips that are sold with this memory, else that which takes the most."""
    sold = {
        chip.gpu_class
        for chip in chips().values()
        if memory_bytes in [size * GIB for size in chip.memory_gib]
    }
    return sold.pop() if len(sold) == 1 else UNKNOWN_GPU


def _mac(memory_bytes: int, os_regime: OsRegime, source: DeviceSource) -> Device:
    working_set = stock_working_set(memory_bytes, os_regime=os_regime)
    device = Device(
        name=f"Mac with {_memory_text(memory_bytes)}",
        backend="metal",
        memory_bytes=memory_bytes,
        working_set_bytes=working_set.bytes,
        max_buffer_bytes=stock_max_buffer(working_set.bytes),
        source=source,
        gpu_class=_gpu_class(memory_bytes),
        stock_working_set_bytes=working_set.bytes,
        note=regime_name(os_regime),
    )
    if working_set.measured:
        return device
    return _noted(device, "no Mac with this memory was measured on it: the working set is by rule")


def _noted(device: Device, remark: str) -> Device:
    return replace(device, note=f"{device.note}; {remark}" if device.note else remark)


def _chip_device(chip: Chip, gib: int, os_regime: OsRegime) -> Device:
    if not runs(chip, os_regime):
        raise InputError(
            f"'{chip.id}-{gib}': no Mac with an {chip.name} runs {regime_name(os_regime)};"
            f" choose {OsRegime.MACOS_26.value}"
        )
    return chip_device(chip, gib * GIB, os_regime=os_regime, source="table")


def _cuda_device(model: GpuModel) -> Device:
    note = None
    if model.unified_memory:
        note = "shares its memory with the system, which takes a part of it"
    elif model.compute_capability < _CUDNN_CAPABILITY:
        note = "MLX's cuDNN attention needs compute capability 8.0: prefill is not fused here"
    return Device(
        name=model.id,
        backend="cuda",
        memory_bytes=model.memory_bytes,
        working_set_bytes=cuda_working_set(model.memory_bytes),
        max_buffer_bytes=None,
        source="table",
        generation=model.compute_capability,
        note=note,
        bandwidth_bytes=model.bandwidth_bytes,
        has_host=not model.unified_memory,
    )


def _as_sold(memory_bytes: int) -> int:
    """Return n GiB for n x 10^9 bytes when Macs are sold with n "GB", else the bytes as given."""
    gigabytes, rest = divmod(memory_bytes, 10**9)
    sold: Any = WORKING_SETS[OsRegime.MACOS_26.value]["measured_gib"]
    return gigabytes * GIB if not rest and gigabytes in sold else memory_bytes


def _memory_text(memory_bytes: int) -> str:
    gib, rest = divmod(memory_bytes, GIB)
    return f"{memory_bytes} bytes" if rest else f"{gib} GiB"


def _check_bytes(what: str, value: int, least: int) -> None:
    if not least <= value <= MAX_MEMORY_BYTES:
        raise InputError(f"{what} of {value} bytes: give from {least} to {MAX_MEMORY_BYTES} bytes")


def _sizes(chip: Chip) -> str:
    *most, last = map(str, chip.memory_gib)
    return f"{', '.join(most)} or {last} GB"


def _names(chip: Chip) -> str:
    return " or ".join(f"{chip.id}-{gib}" for gib in chip.memory_gib)


_OTHER_MAKERS = {
    "AMD": r"(amd|radeon|instinct|ryzen|strix|epyc|firepro).*|rx-?\d{3,4}.*|mi-?\d{2,3}[a-z]?(-.*)?"
    r"|w[67]\d00(-.*)?|gfx\d+.*",
    "Intel": r"(intel|arc|xe2?|lunar|battlemage)(-.*)?|(data-center-gpu|gaudi).*"
    r"|(a[3-7][158]0|a770|b5[78]0|b[56]0)m?",
}
"""How GPUs are named that are neither Apple's nor NVIDIA's."""


def _other_maker(wanted: str) -> str | None:
    """The maker of a GPU that no table has, None where the name is not one of theirs."""
    found = (maker for maker, names in _OTHER_MAKERS.items() if re.fullmatch(names, wanted))
    return next(found, None)


def _nearest(wanted: str) -> str:
    macs = [f"{chip.id}-{gib}" for chip in chips().values() for gib in chip.memory_gib]
    near = nearest(wanted, [*macs, *gpu_models()])
    known = f"nearest: {near}" if near else "names look like m4-max-64 or rtx-4090"
    return f"{known} (memfit devices)"
