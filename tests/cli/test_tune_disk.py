"""``memfit tune disk``: parts of a model are read from the disk, and plans take the rate."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.probes.experiments.disk import (
    EXPERTS,
    LEAST_FILE_BYTES,
    WAYS,
    DiskRead,
    _crossover,
    _disk_rate,
)
from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit

pytestmark = pytest.mark.usefixtures("home")
WHOLE = DiskRead(
    target="file",
    experts=0,
    way="pread",
    nbytes=LEAST_FILE_BYTES,
    ns=10**8,
    from_disk=LEAST_FILE_BYTES,
    is_cold=True,
)


def test_parts_of_a_mixture_are_read_in_every_way(memfit: Memfit, checkpoints: Checkpoints) -> None:
    pytest.importorskip("mlx_lm", reason="the model that is read is mlx-lm's")
    result = memfit("tune", "disk", checkpoints("moe"), "--json").json
    experts = [count for count in EXPERTS if count <= 6]
    expected = [("experts", count) for count in experts] + [("layer", 0), ("file", 0)]
    reads = result["reads"]
    assert [(each["target"], each["experts"], each["way"]) for each in reads] == [
        (target, count, way) for target, count in expected for way in WAYS
    ]
    assert all(each["ns"] > 0 for each in reads)
    for each in reads:
        if each["target"] == "experts":
            assert each["nbytes"] == each["experts"] * result["expert_bytes"]
    assert reads[-1]["nbytes"] == result["file_bytes"]
    # Its file is far too small to say how fast a disk is.
    assert (result["bytes_per_second"], result["crossover_experts"]) == (None, None)
    assert {note["code"] for note in result["notes"]} <= {"small-file", "from-memory"}


def test_a_rate_is_of_a_large_file_that_came_from_the_disk() -> None:
    assert _disk_rate((WHOLE, replace(WHOLE, way="mmap", ns=2 * 10**8)), LEAST_FILE_BYTES) == (
        LEAST_FILE_BYTES * 10,
        [],
    )
    for read, size, code in (
        (replace(WHOLE, is_cold=False), LEAST_FILE_BYTES, "from-memory"),
        (WHOLE, LEAST_FILE_BYTES - 1, "small-file"),
        (replace(WHOLE, from_disk=4096), LEAST_FILE_BYTES, "from-memory"),
    ):
        rate, [note] = _disk_rate((read,), size)
        assert (rate, note.code) == (None, code)
    assert _disk_rate((replace(WHOLE, from_disk=None),), LEAST_FILE_BYTES)[0]


def test_the_crossover_is_where_loading_stays_faster_than_mapping() -> None:
    def reads(*faster: bool) -> tuple[DiskRead, ...]:
        return tuple(
            replace(WHOLE, target="experts", experts=count, way=way, ns=ns)
            for count, is_faster in enumerate(faster, 1)
            for way, ns in (("mmap", 10), ("mx.load", 5 if is_faster else 20))
        )

    counts = [1, 2, 3, 4]
    assert _crossover(reads(False, False, True, True), counts) == 3
    assert _crossover(reads(True, False, True, True), counts) == 3
    assert _crossover(reads(False, False, False, False), counts) is None
    assert _crossover((), []) is None


@pytest.mark.parametrize(
    ("content", "is_used"),
    [('{"bytes_per_second": 1000000000}', True), ("{", False), ('{"bytes_per_second": 0}', False)],
)
def test_plans_for_this_machine_take_the_rate(
    memfit: Memfit, home: Path, content: str, is_used: bool
) -> None:
    home.mkdir(exist_ok=True)
    (home / "disk.json").write_text(content)
    plan = ("plan", "experts", "qwen3-next-80b-a3b-4bit", "--capacity", "64", "--json")
    here = memfit(*plan, "--device", "host").json
    [row] = [row for row in here["rows"] if row["capacity"] == 64]
    assert (row["misses"]["disk_microseconds_per_token"] is not None) == is_used
    assert ("stored-disk" in {note["code"] for note in here["notes"]}) == is_used
    elsewhere = memfit(*plan, "--memory", "32GB").json
    assert elsewhere["rows"][0]["misses"]["disk_microseconds_per_token"] is None
