"""``memfit devices`` as a user sees it."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from memfit.cli.commands.devices import devices
from memfit.estimators.machine.device import OsRegime
from memfit.estimators.machine.devices import list_devices

app = typer.Typer()
app.command()(devices)


def run(*arguments: str, columns: str = "100") -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": columns, "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.stdout


def row(output: str, name: str) -> list[str]:
    """Return the cells of the one line that starts with the name."""
    (line,) = (line for line in output.splitlines() if line.strip().startswith(f"{name} "))
    return line.split()


def test_macs_show_both_regimes_with_their_units() -> None:
    cells = row(run(), "m4-max-64")
    assert cells == ["m4-max-64", "64", "GB", "51.5", "GB", "55.6", "GB"]


def test_working_set_by_rule_is_marked() -> None:
    assert row(run(), "m3-ultra-256")[3:5] == ["~", "206.1"]


def test_a_chip_newer_than_a_macos_version_has_no_figure_for_it() -> None:
    assert row(run(), "m5-max-128") == ["m5-max-128", "128", "GB", "-", "115.4", "GB"]


def test_this_machine_is_the_first_row() -> None:
    assert run().startswith("This machine: ")


def test_one_macos_version_shows_only_its_macs() -> None:
    output = run("--os-regime", "macos-15")
    assert "macOS 13-15" in output
    assert "macOS 26" not in output
    assert "m5-16" not in output


@pytest.mark.parametrize("columns", ["60", "200"])
def test_numbers_are_not_cut_at_any_width(columns: str) -> None:
    assert row(run(columns=columns), "m3-ultra-512")[-2:] == ["498.2", "GB"]


def test_json_has_every_machine_of_the_tables() -> None:
    document: dict[str, Any] = json.loads(run("--json"))
    assert document["schema"] == "memfit.devices/1"
    listed = [*document["apple"]["macos-26"], *document["nvidia"]]
    assert [entry["name"] for entry in listed] == [device.name for device in list_devices()]
    assert set(document["apple"]) == {regime.value for regime in OsRegime}
    (m4_max,) = (entry for entry in listed if entry["name"] == "m4-max-64")
    assert m4_max["working_set_bytes"] == 55_662_788_608
