"""Recommended working sets, compared with reports from Macs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.machine.data.apple import WORKING_SETS
from memfit.estimators.machine.device import (
    GIB,
    PAGE_BYTES,
    OsRegime,
    stock_max_buffer,
    stock_working_set,
)

# macOS 26: mx.device_info of published machines; 192 GB from heylookitsanllm's observability
# guide, 256 GB from an M3 Ultra. macOS 13-15: logs of llama.cpp (MiB), 18 GB from torch.mps.
REPORTED = {
    (OsRegime.MACOS_26, 8): 5_726_633_984,
    (OsRegime.MACOS_26, 16): 12_713_115_648,
    (OsRegime.MACOS_26, 18): 14_302_248_960,
    (OsRegime.MACOS_26, 24): 19_069_665_280,
    (OsRegime.MACOS_26, 32): 26_800_603_136,
    (OsRegime.MACOS_26, 36): 30_150_672_384,
    (OsRegime.MACOS_26, 48): 40_200_896_512,
    (OsRegime.MACOS_26, 64): 55_662_788_608,
    (OsRegime.MACOS_26, 96): 83_494_174_720,
    (OsRegime.MACOS_26, 128): 115_448_725_504,
    (OsRegime.MACOS_26, 192): 173_173_080_064,
    (OsRegime.MACOS_26, 256): 223_338_299_392,
    (OsRegime.MACOS_26, 512): 498_216_206_336,
    (OsRegime.MACOS_15, 18): 12_884_918_272,
    (OsRegime.MACOS_15, 36): 27648 * 2**20,
    (OsRegime.MACOS_15, 48): 36864 * 2**20,
    (OsRegime.MACOS_15, 64): 49152 * 2**20,
    (OsRegime.MACOS_15, 96): 73728 * 2**20,
    (OsRegime.MACOS_15, 128): 98304 * 2**20,
    (OsRegime.MACOS_15, 192): 147456 * 2**20,
}
# llama.cpp prints two decimals of a MiB.
LOGGED_MIB = {8: "5461.34", 16: "10922.67", 24: "16384.02", 32: "21845.34"}


@pytest.mark.parametrize(("regime", "gib"), REPORTED)
def test_the_working_set_equals_a_machines_report(regime: OsRegime, gib: int) -> None:
    working_set = stock_working_set(gib * GIB, os_regime=regime)
    assert working_set.bytes == REPORTED[regime, gib]
    assert working_set.measured


@pytest.mark.parametrize("gib", LOGGED_MIB)
def test_working_set_before_macos_26_agrees_with_the_logs(gib: int) -> None:
    working_set = stock_working_set(gib * GIB, os_regime=OsRegime.MACOS_15)
    assert f"{working_set.bytes / 2**20:.2f}" == LOGGED_MIB[gib]


def test_every_measured_size_has_its_report() -> None:
    logged = {(OsRegime.MACOS_15, gib) for gib in LOGGED_MIB}
    measured = {(regime, g) for regime in OsRegime for g in WORKING_SETS[regime]["measured_gib"]}
    assert measured == {*REPORTED, *logged}


def test_a_size_between_two_machines_uses_the_lower_ratio_with_a_note() -> None:
    working_set = stock_working_set(40 * GIB, os_regime=OsRegime.MACOS_26)
    assert not working_set.measured
    assert working_set.bytes / (40 * GIB) == pytest.approx(0.78, abs=1e-6)


def test_the_largest_macs_on_macos_15_use_the_rule() -> None:
    working_set = stock_working_set(512 * GIB, os_regime=OsRegime.MACOS_15)
    assert (working_set.bytes, working_set.measured) == (384 * GIB, False)


@given(st.sampled_from(OsRegime), st.integers(1, 2**40), st.integers(0, 2**34))
def test_more_memory_never_recommends_less(regime: OsRegime, memory: int, more: int) -> None:
    smaller = stock_working_set(memory, os_regime=regime).bytes
    assert 0 < smaller <= memory
    assert smaller <= stock_working_set(memory + more, os_regime=regime).bytes


# max_buffer_length as MLX or Metal printed it: M4 16 GB, M3 Pro 36 GB, M4 Pro 48 GB, M5 Max
# 128 GB, M2 Ultra 192 GB and M3 Ultra 256 GB on macOS 26; A18 Pro 8 GB; M1 Max 64 GB on macOS 12
# (github.com/gfx-rs/wgpu/pull/2502) and M2 Ultra 192 GB on macOS 14
# (github.com/ml-explore/mlx/pull/1060).
@pytest.mark.parametrize(
    ("regime", "gib", "max_buffer_bytes"),
    [
        (OsRegime.MACOS_26, 8, 4_294_967_296),
        (OsRegime.MACOS_26, 16, 9_534_832_640),
        (OsRegime.MACOS_26, 36, 22_613_000_192),
        (OsRegime.MACOS_26, 48, 30_150_672_384),
        (OsRegime.MACOS_26, 128, 86_586_540_032),
        (OsRegime.MACOS_26, 192, 129_879_801_856),
        (OsRegime.MACOS_26, 256, 167_503_724_544),
        (OsRegime.MACOS_15, 64, 36864 * 2**20),
        (OsRegime.MACOS_15, 192, 115_964_116_992),
    ],
)
def test_the_largest_buffer_equals_a_machines_report(
    regime: OsRegime, gib: int, max_buffer_bytes: int
) -> None:
    working_set = stock_working_set(gib * GIB, os_regime=regime)
    assert stock_max_buffer(working_set.bytes) == max_buffer_bytes


@given(st.integers(0, 2**50))
def test_the_largest_buffer_is_whole_pages(working_set_bytes: int) -> None:
    assert stock_max_buffer(working_set_bytes) % PAGE_BYTES == 0
