"""``memfit measurements``: list, show, remove, export and import."""

import re
from pathlib import Path

import pytest

from memfit.estimators.base.workload import Workload
from memfit.probes.measurement_json import parse_collection
from memfit.probes.store import Store
from tests.cli.running import Memfit
from tests.probes.measurements import measurement

ONE = measurement()
QUANTISED = measurement(
    workload=Workload(prompt_tokens=70_000, max_tokens=32, prefill_step=512, kv_bits=4),
    model="mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit",
    measured_at="2026-11-22T08:00:00+00:00",
    wired_limit_bytes=10**9,
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """The user's store with two measurements."""
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path / "home"))
    store = Store(tmp_path / "home" / "measurements")
    store.save(ONE)
    store.save(QUANTISED)
    return store


def test_a_list_has_a_row_per_measurement_and_cuts_nothing(memfit: Memfit, store: Store) -> None:
    run = memfit("measurements", "list")
    assert (run.code, run.err) == (0, "")
    rows = [line for line in run.out.splitlines() if "2026-11-2" in line]
    assert rows[0].split("  ")[0].strip() == ONE.id
    assert rows[0].endswith("1.5 MB")  # the median of 1.5, 1.6 and 1.5
    assert rows[1].startswith(QUANTISED.id)


@pytest.mark.parametrize("width", [80, 140])
def test_a_list_and_a_single_measurement_fit_the_terminal(
    memfit: Memfit, store: Store, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run = memfit("measurements", "list")
    lines = run.out.splitlines() + memfit("measurements", "show", QUANTISED.id).out.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    cells = [re.split(r"  +", line) for line in run.out.splitlines()]
    if width == 140:
        assert cells[3][2:4] == [QUANTISED.model, "70000 + 32 tokens by steps of 512 with 4-bit KV"]


def test_an_empty_store_states_its_folder_and_how_to_fill_it(memfit: Memfit, store: Store) -> None:
    store.remove([ONE.id, QUANTISED.id])
    run = memfit("measurements", "list")
    assert run.code == 0
    # The line wraps where the terminal ends, also within the path.
    said = f"no measurements in {store.directory}; memfit tune MODEL makes one"
    assert "".join(run.out.split()) == "".join(said.split())
    assert memfit("measurements", "list", "--json").json["measurements"] == []


def test_the_directory_of_the_environment_is_escaped(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_HOME", "\x1b[31m")
    assert "no measurements in \\x1b[31m/measurements;" in memfit("measurements", "list").out
    monkeypatch.setenv("HOME", "/\x9b31m")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert memfit("cache", "info").out.startswith("/\\x9b31m/")


def test_one_measurement_is_shown_with_every_figure_and_its_spread(
    memfit: Memfit, store: Store
) -> None:
    run = memfit("measurements", "show", ONE.id)
    words = [line.split() for line in run.out.splitlines()]
    assert ["Peak", "in", "prefill", "1.5", "MB", "100.0", "kB"] in words
    assert ["Weights", "700.0", "kB", "-"] in words
    assert not [line for line in words if line[:2] == ["Process,", "resident"]]  # not measured
    assert "loaded in 0.012 s, first token after 0.002 s, prefill 32000 tokens/s" in run.out
    assert (
        "with a wired limit of 1000000000 bytes" in memfit("measurements", "show", QUANTISED.id).out
    )


def test_the_units_option_is_respected(memfit: Memfit, store: Store) -> None:
    assert "KiB" in memfit("measurements", "show", ONE.id, "--units", "gib").out
    assert "MiB" in memfit("measurements", "list", "--units", "gib").out


def test_measurements_are_removed_and_an_unknown_id_is_bad_input(
    memfit: Memfit, store: Store
) -> None:
    run = memfit("measurements", "rm", ONE.id, ONE.id)
    assert (run.code, run.out) == (0, "1 measurement removed\n")
    for command in ("rm", "show"):
        run = memfit("measurements", command, ONE.id)
        assert (run.code, run.out) == (2, "")
        assert run.err.startswith(f"memfit: {ONE.id}: no such measurement in ")
    assert store.all().measurements == (QUANTISED,)


def test_an_export_can_be_imported_elsewhere(
    memfit: Memfit, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exported = tmp_path / "measurements.json"
    assert memfit("measurements", "export", "-o", exported).out == ""
    assert memfit("measurements", "export").json == memfit("measurements", "list", "--json").json
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path / "elsewhere"))
    run = memfit("measurements", "import", exported)
    assert (run.code, run.out) == (0, "2 measurements added, 0 already here\n")
    assert Store(tmp_path / "elsewhere" / "measurements").all() == store.all()
    assert (
        memfit("measurements", "import", exported).out == "0 measurements added, 2 already here\n"
    )


def test_json_of_one_measurement_is_an_export_of_one(memfit: Memfit, store: Store) -> None:
    run = memfit("measurements", "show", QUANTISED.id, "--json")
    assert len(run.json["measurements"]) == 1
    assert parse_collection(run.out.encode(), Path("out")) == (QUANTISED,)


def test_importing_another_file_is_bad_input(memfit: Memfit, store: Store, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text in ("{}", "[", '{"schema": "memfit.measurements/1", "measurements": [{}]}'):
        other.write_text(text)
        run = memfit("measurements", "import", other)
        assert (run.code, run.out) == (2, "")
        assert run.err.startswith(f"memfit: {other}: ")
        assert run.err.count("\n") == 1
    assert memfit("measurements", "import", tmp_path / "none.json").code == 2
    assert len(store.all().measurements) == 2


def test_a_damaged_record_is_a_warning_and_the_rest_is_listed(memfit: Memfit, store: Store) -> None:
    (store.directory / f"{ONE.id}.json").write_text("{")
    run = memfit("measurements", "list", "--json")
    assert run.code == 0
    assert [kept["id"] for kept in run.json["measurements"]] == [QUANTISED.id]
    assert run.err.count("\n") == 1
    assert f"it is renamed to {ONE.id}.json.damaged" in run.err
