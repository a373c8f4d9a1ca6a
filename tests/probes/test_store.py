"""The store returns what was saved, despite other files and other writing processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Measurement
from memfit.probes.measurement_json import collection_text, parse_measurement, to_text
from memfit.probes.store import ImportCounts, Store, StoredMeasurements, user_store
from tests.probes.measurements import measurement

ONE = measurement()
OTHER_MODEL = measurement(fingerprint="f" * 64, measured_at="2026-11-22T00:00:00+00:00")
LONGER = measurement(workload=Workload(prompt_tokens=65, max_tokens=8))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home" / "measurements")


def file_of(store: Store, kept: Measurement) -> Path:
    return store.directory / f"{kept.id}.json"


def test_a_saved_measurement_is_found_by_id_and_by_checkpoint(store: Store) -> None:
    assert store.all() == StoredMeasurements((), ())
    for each in (OTHER_MODEL, ONE, LONGER):
        store.save(each)
    assert set(store.all().measurements) == {ONE, LONGER, OTHER_MODEL}
    assert store.all().measurements[-1] == OTHER_MODEL  # the newest
    assert set(store.of(ONE.fingerprint).measurements) == {ONE, LONGER}
    assert store.get(LONGER.id) == LONGER


def test_a_new_measurement_with_the_same_key_replaces_the_old_one(store: Store) -> None:
    store.save(ONE)
    again = measurement(measured_at="2026-12-01T00:00:00+00:00", swift_workspace_bytes=1)
    store.save(again)
    assert store.all().measurements == (again,)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "a" * 64},
        {"device": "Apple M4 Max"},
        {"mlx_version": "0.33.0"},
        {"mlx_lm_version": "0.33.0"},
        {"workload": Workload(prompt_tokens=64, max_tokens=8, kv_bits=8)},
        {"wired_limit_bytes": 10**9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_the_key_makes_another_id(change: dict[str, Any]) -> None:
    assert measurement(**change).id != ONE.id
    assert measurement(model="elsewhere", swift_workspace_bytes=None).id == ONE.id


def test_a_removed_measurement_is_gone(store: Store) -> None:
    for each in (ONE, LONGER):
        store.save(each)
    store.remove([ONE.id])
    assert store.all().measurements == (LONGER,)
    with pytest.raises(InputError, match=f"{ONE.id}: no such measurement"):
        store.remove([LONGER.id, ONE.id])
    assert store.all().measurements == (LONGER,)


@pytest.mark.parametrize(
    "id", ["", "../../etc/passwd", "0123456789abcdef", "x\ny", f"{ONE.id}.json"]
)
def test_an_invalid_id_names_no_file(store: Store, id: str) -> None:
    store.save(ONE)
    with pytest.raises(InputError, match="no such measurement"):
        store.get(id)
    with pytest.raises(InputError, match="no such measurement"):
        store.remove([id])
    assert store.all().measurements == (ONE,)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(to_text(ONE)), **changes})


DAMAGED = {
    "cut short": to_text(ONE)[:-20],
    "empty": "",
    "no object": "[]",
    "no schema": changed(schema=None),
    "another schema": changed(schema="memfit.lock/1"),
    "negative": changed(swift_workspace_bytes=-1),
    "a number with a fraction": changed(swift_workspace_bytes=1.5),
    "a truth": changed(swift_workspace_bytes=True),
    "endless": changed(swift_workspace_bytes=10**40),
    "a key more": changed(more=1),
    "no runs": changed(runs=[]),
    "a run that is none": changed(runs=[1]),
    "two lines": changed(model="a\nb"),
    "no text": changed(model=7),
    "no backend": changed(backend="vulkan"),
    "no time": changed(measured_at="yesterday"),
    "no fingerprint": changed(fingerprint="abc"),
    "another key": changed(device="other"),
    "no workload": changed(workload=None),
    "a workload that cannot be": changed(
        workload={**json.loads(to_text(ONE))["workload"], "batch": 0}
    ),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_moved_away_and_the_others_are_read(store: Store, text: str) -> None:
    store.save(LONGER)
    file_of(store, ONE).write_text(text)
    kept = store.all()
    assert kept.measurements == (LONGER,)
    (warning,) = kept.warnings
    assert f"{ONE.id}.json" in warning
    assert warning.endswith(f"it is renamed to {ONE.id}.json.damaged")
    assert "\n" not in warning
    assert file_of(store, ONE).with_suffix(".json.damaged").read_text() == text
    assert store.all() == StoredMeasurements((LONGER,), ())
    store.save(ONE)
    assert set(store.all().measurements) == {ONE, LONGER}


def test_a_damaged_record_requested_by_id_is_moved_away_too(store: Store) -> None:
    store.save(ONE)
    file_of(store, ONE).write_text("{")
    with pytest.raises(InputError, match=f"it is renamed to {ONE.id}.json.damaged"):
        store.get(ONE.id)
    assert store.all() == StoredMeasurements((), ())


def test_a_record_under_another_id_is_damaged(store: Store) -> None:
    store.save(ONE)
    file_of(store, ONE).rename(file_of(store, LONGER))
    kept = store.all()
    assert kept.measurements == ()
    assert f"contains the measurement {ONE.id}; it is renamed" in kept.warnings[0]


def test_a_record_of_a_newer_memfit_is_left_alone(store: Store) -> None:
    store.save(LONGER)
    file_of(store, ONE).write_text(changed(schema="memfit.measurement/2", more=[]))
    for _ in range(2):
        kept = store.all()
        assert kept.measurements == (LONGER,)
        assert "from a newer memfit" in kept.warnings[0]
    with pytest.raises(InputError, match="update memfit"):
        store.get(ONE.id)


def test_a_folder_or_pipe_is_ignored_and_kept(store: Store) -> None:
    store.save(LONGER)
    file_of(store, ONE).mkdir()
    kept = store.all()
    assert kept.measurements == (LONGER,)
    assert kept.warnings[0].endswith("is not a regular file; the measurement is not used")


def test_files_with_other_names_are_not_measurements(store: Store) -> None:
    store.save(ONE)
    (store.directory / "notes.json").write_text("{}")
    (store.directory / "tmp12345").write_text("half of a")
    assert store.all() == StoredMeasurements((ONE,), ())


WRITER = """
import sys
from pathlib import Path
from memfit.probes.store import Store
from tests.probes.measurements import measurement
store = Store(Path(sys.argv[1]))
for turn in range(60):
    store.save(measurement(swift_workspace_bytes=turn))
    kept = store.all()
    assert len(kept.measurements) == 1 and not kept.warnings, kept
"""


def test_two_processes_write_at_once_without_lost_or_partial_files(store: Store) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(store.directory)]
    writers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        _, err = writer.communicate(timeout=60)
        assert writer.returncode == 0, err.decode()
    assert [path.name for path in store.directory.iterdir()] == [f"{ONE.id}.json"]
    assert store.get(ONE.id).swift_workspace_bytes == 59


def test_a_directory_that_cannot_be_created_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(
        InputError, match=r"cannot be written: .*; set MEMFIT_HOME to another directory"
    ):
        Store(tmp_path / "home" / "measurements").save(ONE)


def test_an_import_adds_missing_measurements(store: Store, tmp_path: Path) -> None:
    here = measurement(swift_workspace_bytes=1)
    store.save(here)
    path = tmp_path / "collection.json"
    path.write_text(collection_text([ONE, LONGER, OTHER_MODEL]))
    assert store.add(path) == ImportCounts(added=2, skipped=1)
    assert set(store.all().measurements) == {here, LONGER, OTHER_MODEL}
    assert store.add(path) == ImportCounts(added=0, skipped=3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda data: data.update(schema="memfit.lock/1"),
            "schema: expected memfit.measurements/1",
        ),
        (lambda data: data.update(schema="memfit.measurements/9"), "update memfit"),
        (lambda data: data.update(measurements=None), "measurements: expected a list"),
        (
            lambda data: data["measurements"][1].update(id="00000000-00000000"),
            r"measurements\[1\].id: expected [0-9a-f]{8}-[0-9a-f]{8}, got 00000000-00000000",
        ),
        (
            lambda data: data["measurements"][1]["runs"][0].pop("kv_bytes"),
            r"measurements\[1\].runs\[0\].kv_bytes: missing",
        ),
    ],
)
def test_a_damaged_import_changes_nothing(
    store: Store, tmp_path: Path, damage: Callable[[Any], Any], message: str
) -> None:
    data = json.loads(collection_text([ONE, LONGER]))
    damage(data)
    path = tmp_path / "collection.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        store.add(path)
    assert store.all() == StoredMeasurements((), ())


def test_the_store_is_in_the_folder_memfit_home_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path))
    assert user_store().directory == tmp_path / "measurements"
    monkeypatch.delenv("MEMFIT_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_store().directory.parent.name == "memfit"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def read(text: str) -> Measurement | str:
    try:
        return parse_measurement(text.encode(), Path("kept.json"))
    except InputError as error:
        return str(error)


@given(key=st.sampled_from(sorted(json.loads(to_text(ONE)))), value=JSON)
def test_any_value_in_any_field_is_read_or_gives_a_one_line_error(key: str, value: Any) -> None:
    found = read(changed(**{key: value}))
    if isinstance(found, str):
        assert found.startswith("kept.json: ")
        assert "\n" not in found
    else:
        assert read(to_text(found)) == found
