"""Machines by name, memory and working set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.machine.device import GIB, UNKNOWN_GPU, OsRegime
from memfit.estimators.machine.devices import (
    MIB,
    _other_maker,
    find_device,
    list_devices,
    memory_device,
    with_wired_limit,
    working_set_device,
)


@pytest.mark.parametrize("regime", OsRegime)
def test_every_listed_machine_is_found_by_its_name(regime: OsRegime) -> None:
    listed = list_devices(os_regime=regime)
    assert len({device.name for device in listed}) == len(listed)
    for device in listed:
        assert find_device(device.name, os_regime=regime) == device


# Generation and class from mx.device_info: github.com/ml-explore/mlx/pull/1060 (M2
# Ultra) and /issues/3885 (M4 Max), where a Pro is an s like its Max.
@pytest.mark.parametrize(
    ("name", "architecture"),
    [("m2-ultra-192", "g14d"), ("m4-max-64", "g16s"), ("m4-pro-48", "g16s"), ("m1-8", "g13g")],
)
def test_the_gpu_of_a_chip_has_metals_name(name: str, architecture: str) -> None:
    device = find_device(name)
    assert f"g{device.generation}{device.gpu_class}" == architecture


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        *((name, "AMD") for name in ("rx-7900-xtx", "RX 6800", "mi300x", "radeon pro w7900")),
        *((name, "AMD") for name in ("w7900", "Instinct MI210", "ryzen-ai-max-395", "gfx1100")),
        *((name, "Intel") for name in ("arc-a770", "b580", "Intel Arc B60", "gaudi-3")),
    ],
)
def test_a_gpu_of_another_maker_is_not_likened_to_nvidias(name: str, maker: str) -> None:
    with pytest.raises(InputError) as caught:
        find_device(name)
    assert f"{name!r}: {maker} GPUs are not described" in str(caught.value)
    assert "nearest" not in str(caught.value)


def test_no_machine_of_the_tables_is_taken_for_another_makers() -> None:
    names = [device.name for device in list_devices()]
    named = {*names, *(name.rpartition("-")[0] or name for name in names), "a100", "b100"}
    assert [name for name in named if _other_maker(name)] == []


def test_names_are_read_as_people_write_them() -> None:
    assert find_device(" M4 Max 64 ") == find_device("m4-max-64")
    assert find_device("RTX_4090") == find_device("rtx-4090")


def test_default_is_the_newest_macos() -> None:
    assert find_device("m4-max-64") == find_device("m4-max-64", os_regime=OsRegime.MACOS_26)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m4-max-96", "'m4-max-96': the M4 Max was sold with 36, 48, 64 or 128 GB"),
        ("m2-max-64gb", "'m2-max-64gb': the M2 Max was sold with 32, 64 or 96 GB"),
        ("m1", "'m1': name its memory too, such as m1-8 or m1-16"),
        ("rtx-4091", "unknown machine 'rtx-4091'; nearest: rtx-4090, "),
        ("h100", "unknown machine 'h100'; nearest: "),
        ("toaster", "unknown machine 'toaster'; names look like m4-max-64 or rtx-4090"),
    ],
)
def test_an_unknown_name_is_reported_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_device(name)
    assert str(caught.value).startswith(message)


def test_a_chip_newer_than_a_macos_version_is_rejected_with_it() -> None:
    with pytest.raises(InputError, match="no Mac with an M5 runs macOS 13-15; choose macos-26"):
        find_device("m5-16", os_regime=OsRegime.MACOS_15)
    assert all(
        not device.name.startswith("m5") for device in list_devices(os_regime=OsRegime.MACOS_15)
    )


@given(st.text(max_size=40) | st.sampled_from(("m1-" + "9" * 5000, "m1-٨", "9" * 10**5)))
def test_any_name_gives_a_machine_or_a_one_line_error(name: str) -> None:
    try:
        answer = find_device(name).name
    except InputError as error:
        answer = str(error)
    assert answer.isprintable()


def test_memory_in_gigabytes_selects_the_mac_sold_with_it() -> None:
    device = memory_device(64 * 10**9)
    assert device.memory_bytes == 64 * GIB
    assert device.working_set_bytes == find_device("m4-max-64").working_set_bytes
    assert "a Mac sold with 64 GB has 64 GiB" in str(device.note)


def test_a_memory_size_never_sold_is_accepted_and_marked() -> None:
    device = memory_device(50 * 10**9)
    assert device.memory_bytes == 50 * 10**9
    assert "by rule" in str(device.note)
    assert device.gpu_class == UNKNOWN_GPU


@pytest.mark.parametrize("memory_bytes", [-1, 0, 64, 2**50 + 1, 10**30])
def test_an_impossible_memory_size_is_rejected(memory_bytes: int) -> None:
    with pytest.raises(InputError, match="memory of"):
        memory_device(memory_bytes)


def test_a_given_working_set_is_used_to_the_byte() -> None:
    device = working_set_device(12_345_678_901)
    assert device.working_set_bytes == 12_345_678_901
    assert device.max_buffer_bytes is None


@pytest.mark.parametrize("working_set_bytes", [-1, 0, 10**30])
def test_an_impossible_working_set_is_rejected(working_set_bytes: int) -> None:
    with pytest.raises(InputError, match="working set of"):
        working_set_device(working_set_bytes)


def test_a_wired_limit_changes_the_working_set_and_not_the_largest_buffer() -> None:
    # mx.metal.device_info of an M2 Ultra 192 GB: github.com/ml-explore/mlx/pull/1060.
    stock = find_device("m2-ultra-192", os_regime=OsRegime.MACOS_15)
    raised = with_wired_limit(stock, 180_000)
    assert raised.working_set_bytes == 188_743_680_000
    assert raised.max_buffer_bytes == 115_964_116_992
    assert raised.stock_working_set_bytes == stock.working_set_bytes


def test_a_wired_limit_of_zero_is_the_default() -> None:
    stock = find_device("m4-max-64")
    assert with_wired_limit(with_wired_limit(stock, 60_000), 0).working_set_bytes == 55_662_788_608


@pytest.mark.parametrize("mebibytes", [-1, 64 * 1024 + 1, 10**20])
def test_a_wired_limit_above_the_memory_is_rejected(mebibytes: int) -> None:
    with pytest.raises(InputError, match="is not between 0 and its 65536 MiB of memory"):
        with_wired_limit(find_device("m4-max-64"), mebibytes)


def test_a_wired_limit_is_only_for_macs() -> None:
    with pytest.raises(InputError, match=r"rtx-4090: iogpu\.wired_limit_mb is a setting of Macs"):
        with_wired_limit(find_device("rtx-4090"), 1024)


def test_gpu_memory_equals_the_output_of_nvidia_smi() -> None:
    device = find_device("h200")
    assert device.memory_bytes == 143_771 * MIB
    # mlx/backend/cuda/allocator.cpp: memory_limit_ = total * 0.95
    assert device.working_set_bytes == int(143_771 * MIB * 0.95)


def test_a_gpu_that_cannot_fuse_prefill_gives_a_note() -> None:
    assert "not fused" in str(find_device("t4").note)
    assert find_device("rtx-3090").note is None
