"""This machine, and Macs and containers from the output of their tools."""

import platform
from pathlib import Path

import pytest

from memfit.estimators.machine.device import UNKNOWN_GPU
from memfit.estimators.machine.host import (
    Gpu,
    MacFacts,
    Memory,
    detect_host,
    linux_from,
    mac_from,
    with_live_values,
)

GIB = 2**30
M4_MAX = MacFacts(64 * GIB, "Apple M4 Max", 0)


def test_a_mac_uses_the_table_of_its_macos_version() -> None:
    assert mac_from(M4_MAX, "26.1").working_set_bytes == 55_662_788_608
    assert mac_from(M4_MAX, "15.7.9").working_set_bytes == 49152 * 2**20
    assert mac_from(M4_MAX, "").working_set_bytes == 49152 * 2**20


def test_a_mac_has_the_name_it_reports() -> None:
    mac = mac_from(M4_MAX, "26.1")
    assert (mac.name, mac.source, mac.gpu_class, mac.generation) == (
        "Apple M4 Max",
        "detected",
        "s",
        16,
    )


def test_the_wired_limit_of_the_mac_overrides_the_table() -> None:
    mac = mac_from(MacFacts(64 * GIB, "Apple M4 Max", 60_000), "26.1")
    assert mac.working_set_bytes == 60_000 * 2**20
    assert mac.stock_working_set_bytes == 55_662_788_608


@pytest.mark.parametrize("brand", ["Apple M9 Max", "Apple processor", "VirtualApple @ 2.50GHz"])
def test_an_unknown_future_chip_is_sized_by_its_memory(brand: str) -> None:
    mac = mac_from(MacFacts(3 * GIB, brand, 0), "27.0")
    assert mac.gpu_class == UNKNOWN_GPU
    assert 0 < mac.working_set_bytes < 3 * GIB


def test_live_values_override_the_table() -> None:
    # mx.device_info of an M4 Pro 48 GB on macOS 26, as published.
    info = {
        "resource_limit": 499000,
        "max_buffer_length": 30150672384,
        "architecture": "applegpu_g16s",
        "memory_size": 51539607552,
        "max_recommended_working_set_size": 40200896512,
        "device_name": "Apple M4 Pro",
    }
    mac = with_live_values(mac_from(MacFacts(48 * GIB, "Apple M9", 0), "15.0"), info)
    assert mac.working_set_bytes == 40_200_896_512
    assert mac.max_buffer_bytes == 30_150_672_384
    assert (mac.generation, mac.gpu_class) == (16, "s")


def test_device_info_of_a_build_without_a_gpu_changes_nothing() -> None:
    mac = mac_from(M4_MAX, "26.1")
    assert with_live_values(mac, {"architecture": "x86_64", "device_name": "AMD EPYC"}) == mac


def test_a_container_limit_overrides_the_memory_of_the_machine() -> None:
    device = linux_from(Memory(64 * GIB, GIB), 8 * GIB, None)
    assert (device.memory_bytes, device.working_set_bytes) == (8 * GIB, 8 * GIB)
    assert device.used_by_others_bytes is None
    assert device.note == "the container's limit"


def test_a_limit_above_the_memory_has_no_effect() -> None:
    device = linux_from(Memory(8 * GIB, GIB), 64 * GIB, None)
    assert (device.memory_bytes, device.used_by_others_bytes) == (8 * GIB, GIB)


def test_the_gpu_memory_overrides_the_memory_of_the_machine() -> None:
    gpu = Gpu("NVIDIA GeForce RTX 4090", Memory(24564 * 2**20, 700 * 2**20))
    device = linux_from(Memory(64 * GIB, GIB), None, (gpu, gpu))
    assert (device.backend, device.generation) == ("cuda", 89)
    assert device.memory_bytes == 24564 * 2**20
    assert device.used_by_others_bytes == 700 * 2**20
    assert device.note == "the first of 2 GPUs; MLX runs a model on one"


def test_a_gpu_without_its_own_memory_shares_that_of_the_machine() -> None:
    device = linux_from(Memory(120 * GIB, 10 * GIB), None, (Gpu("NVIDIA GB10", None),))
    assert (device.memory_bytes, device.generation) == (120 * GIB, 121)
    assert device.note == "shares its memory with the system"


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_this_machine_is_detected() -> None:
    device = detect_host()
    assert device is not None
    assert device.source == "detected"
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert device.backend != "cpu" or 0 < device.memory_bytes <= total
    assert 0 < device.working_set_bytes <= device.memory_bytes
