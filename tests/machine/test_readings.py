"""Output of system tools, in their own formats and damaged."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.machine.host import (
    Gpu,
    MacFacts,
    Memory,
    parse_cgroup,
    parse_cgroup_limit,
    parse_meminfo,
    parse_nvidia_smi,
    parse_sysctl,
    parse_vm_stat,
)

MIB = 2**20

MEMINFO = """\
MemTotal:       24684096 kB
MemFree:        23728620 kB
MemAvailable:   24159712 kB
Buffers:            7344 kB
Cached:           562772 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               65433.
Pages active:                           1208544.
Pages inactive:                         1185620.
Pages speculative:                        22171.
Pages throttled:                              0.
Pages wired down:                        251321.
Pages purgeable:                          13245.
"Translation faults":                3325452346.
Pages copy-on-write:                   98756423.
Pages zero filled:                   1789543210.
Pages reactivated:                     75643210.
Pages purged:                           5643210.
File-backed pages:                       654321.
Anonymous pages:                        1762014.
Pages stored in compressor:             1345678.
Pages occupied by compressor:            412345.
Decompressions:                        12345678.
Compressions:                          23456789.
Pageins:                               34567890.
Pageouts:                                123456.
Swapins:                                 654321.
Swapouts:                                765432.
"""

SYSCTL = """\
hw.memsize: 68719476736
machdep.cpu.brand_string: Apple M4 Max
iogpu.wired_limit_mb: 0
"""


def test_meminfo_in_kib_becomes_bytes() -> None:
    assert parse_meminfo(MEMINFO) == Memory(24684096 * 1024, (24684096 - 24159712) * 1024)


def test_an_old_kernel_without_available_memory_uses_free_memory() -> None:
    text = MEMINFO.replace("MemAvailable:", "SomethingElse:")
    assert parse_meminfo(text) == Memory(24684096 * 1024, (24684096 - 23728620) * 1024)


@pytest.mark.parametrize(
    "text", ["", "MemTotal: lots", "MemTotal:       0 kB", "\x00MemTotal: 1 kB"]
)
def test_meminfo_without_a_total_gives_no_reading(text: str) -> None:
    assert parse_meminfo(text) is None


def test_vm_stat_counts_memory_that_cannot_be_reclaimed() -> None:
    pages = 1762014 - 13245 + 251321 + 412345
    assert parse_vm_stat(VM_STAT) == pages * 16384


@pytest.mark.parametrize("line", ["Anonymous pages", "Pages wired down", "page size"])
def test_an_incomplete_vm_stat_gives_no_reading(line: str) -> None:
    assert parse_vm_stat(VM_STAT.replace(line, "Pages elsewhere")) is None


def test_nvidia_smi_rows_are_mib() -> None:
    text = "NVIDIA H200, 143771, 4\nNVIDIA H200, 143771, 130215\n"
    assert parse_nvidia_smi(text) == (
        Gpu("NVIDIA H200", Memory(143771 * MIB, 4 * MIB)),
        Gpu("NVIDIA H200", Memory(143771 * MIB, 130215 * MIB)),
    )


def test_a_gpu_that_shares_system_memory_has_none_of_its_own() -> None:
    assert parse_nvidia_smi("NVIDIA GB10, [N/A], [N/A]\n") == (Gpu("NVIDIA GB10", None),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
    ],
)
def test_nvidia_smi_without_a_gpu_gives_no_reading(text: str) -> None:
    assert parse_nvidia_smi(text) is None


def test_sysctl_gives_the_name_of_the_mac() -> None:
    assert parse_sysctl(SYSCTL) == MacFacts(68719476736, "Apple M4 Max", 0)


def test_sysctl_with_a_wired_limit_keeps_it() -> None:
    text = SYSCTL.replace("wired_limit_mb: 0", "wired_limit_mb: 60000")
    assert parse_sysctl(text) == MacFacts(68719476736, "Apple M4 Max", 60000)


def test_macos_without_the_wired_limit_has_the_default() -> None:
    assert parse_sysctl(SYSCTL.rpartition("iogpu")[0]) == MacFacts(68719476736, "Apple M4 Max", 0)


def test_a_wired_limit_above_the_memory_is_ignored() -> None:
    text = SYSCTL.replace("wired_limit_mb: 0", "wired_limit_mb: 65537")
    assert parse_sysctl(text) == MacFacts(68719476736, "Apple M4 Max", 0)


def test_sysctl_without_memory_gives_no_reading() -> None:
    assert parse_sysctl(SYSCTL.replace("68719476736", "many")) is None


def test_container_of_version_2_is_limited_by_itself_and_its_parents() -> None:
    assert parse_cgroup("0::/user.slice/app\n") == (
        "/sys/fs/cgroup/user.slice/app/memory.max",
        "/sys/fs/cgroup/user.slice/memory.max",
        "/sys/fs/cgroup/memory.max",
    )


def test_container_of_version_1_is_limited_by_its_memory_controller() -> None:
    text = "5:cpuset:/\n4:memory:/docker/1f\n1:name=systemd:/docker/1f\n"
    assert parse_cgroup(text) == (
        "/sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    )


def test_cgroup_names_cannot_leave_the_folder() -> None:
    assert all(".." not in file for file in parse_cgroup("0::/../../etc\n"))


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("9223372036854771712\n", None), ("2147483648\n", 2**31), ("-1\n", None)],
)
def test_a_container_limit_is_in_bytes(text: str, limit: int | None) -> None:
    assert parse_cgroup_limit(text) == limit


PARSERS: list[Callable[[str], object]] = [
    parse_meminfo,
    parse_vm_stat,
    parse_nvidia_smi,
    parse_sysctl,
    parse_cgroup,
    parse_cgroup_limit,
]


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text())
def test_any_text_is_read_without_an_error(parse: Callable[[str], object], text: str) -> None:
    parse(text)


@pytest.mark.parametrize(("parse", "text"), [(parse_meminfo, MEMINFO), (parse_vm_stat, VM_STAT)])
@given(data=st.data())
def test_damaged_text_is_read_without_an_error(
    parse: Callable[[str], object], text: str, data: st.DataObject
) -> None:
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    parse(text[:start] + data.draw(st.text(alphabet="0123456789:. kB\n", max_size=40)) + text[end:])
