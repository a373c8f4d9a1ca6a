"""The checkpoint of a stopped sweep: found only by the same sweep, and never fatal."""

from pathlib import Path

import pytest

from memfit.estimators.base.workload import Workload
from memfit.probes.experiments.sweep import Sweeps
from memfit.probes.store import Store
from tests.probes.measurements import measurement

ONE = measurement()
TWO = measurement(workload=Workload(prompt_tokens=128))
IDS = (ONE.id, TWO.id)


@pytest.fixture
def sweeps(tmp_path: Path) -> Sweeps:
    store = Store(tmp_path / "measurements")
    store.save(ONE)
    store.save(TWO)
    return Sweeps(tmp_path / "sweeps", store)


def files(sweeps: Sweeps) -> list[Path]:
    return sorted(sweeps.directory.iterdir())


def test_finished_points_are_found_by_the_same_sweep(sweeps: Sweeps) -> None:
    sweeps.checkpoint(IDS, "Hi").add(ONE.id)
    assert sweeps.checkpoint(reversed(IDS), "Hi").measured() == {ONE.id: ONE}
    sweeps.checkpoint(IDS, "Hi").add(TWO.id)
    assert sweeps.checkpoint(IDS, "Hi").measured() == {ONE.id: ONE, TWO.id: TWO}


def test_other_points_or_another_prompt_make_another_sweep(sweeps: Sweeps) -> None:
    sweeps.checkpoint(IDS, "Hi").add(ONE.id)
    assert sweeps.checkpoint(IDS, None).measured() == {}
    assert sweeps.checkpoint(IDS, "Ho").measured() == {}
    assert sweeps.checkpoint(IDS[:1], "Hi").measured() == {}


def test_the_same_sweep_in_two_processes_loses_nothing(sweeps: Sweeps) -> None:
    first, second = sweeps.checkpoint(IDS, "Hi"), sweeps.checkpoint(IDS, "Hi")
    first.add(ONE.id)
    second.add(TWO.id)
    assert sweeps.checkpoint(IDS, "Hi").measured().keys() == {ONE.id, TWO.id}
    first.finish()
    second.add(TWO.id)
    assert sweeps.checkpoint(IDS, "Hi").measured().keys() == {ONE.id, TWO.id}


def test_a_finished_sweep_starts_again(sweeps: Sweeps) -> None:
    partial = sweeps.checkpoint(IDS, "Hi")
    partial.add(ONE.id)
    partial.finish()
    partial.finish()
    assert files(sweeps) == []
    assert sweeps.checkpoint(IDS, "Hi").measured() == {}


def test_a_removed_measurement_is_measured_again(sweeps: Sweeps) -> None:
    for id in IDS:
        sweeps.checkpoint(IDS, "Hi").add(id)
    sweeps.store.remove([ONE.id])
    assert sweeps.checkpoint(IDS, "Hi").measured() == {TWO.id: TWO}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b'{"measurements": 1, "schema": "memfit.sweep/1"}',
        b'{"measurements": [1, null, "../../etc/passwd", {}], "schema": "memfit.sweep/1"}',
        b'{"measurements": ["0", "1"], "schema": "memfit.sweep/2"}',
        b"[" * 100_000,
        b" " * 2_000_000,
    ],
)
def test_a_damaged_file_counts_as_missing(sweeps: Sweeps, content: bytes) -> None:
    sweeps.checkpoint(IDS, "Hi").add(ONE.id)
    (path,) = files(sweeps)
    path.write_bytes(content)
    again = sweeps.checkpoint(IDS, "Hi")
    assert again.measured() == {}
    again.add(TWO.id)
    assert sweeps.checkpoint(IDS, "Hi").measured() == {TWO.id: TWO}
