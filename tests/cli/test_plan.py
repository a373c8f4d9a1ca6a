"""``memfit plan request`` and ``memfit plan wired`` as commands."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

PLANS = Path(__file__).parents[2] / "sample_configs" / "plans"
SERVER, RAISED = PLANS / "wired-server.yaml", PLANS / "wired-raised-limit.yaml"
ROOM = ("--requested", "64", "--capacity", "4k")


@pytest.mark.parametrize(
    ("used", "code", "admission"),
    [("32", 0, "admitted"), ("4090", 0, "shortened"), ("5000", 1, "refused")],
)
def test_a_request_is_answered_in_every_format(
    memfit: Memfit, used: str, code: int, admission: str
) -> None:
    run = memfit("plan", "request", "--used", used, *ROOM, "--json")
    assert (run.code, run.json["admission"]) == (code, admission)
    for form in ("table", "markdown"):
        shown = memfit("plan", "request", "--used", used, *ROOM, "--format", form)
        assert shown.code == code
        assert f"{admission.capitalize()}: {run.json['reason']}." in shown.out


@pytest.mark.parametrize("option", ["--used", "--requested", "--capacity"])
@pytest.mark.parametrize("value", ["-1", "many", "1.5", "2000000m"])
def test_an_invalid_count_is_reported(memfit: Memfit, option: str, value: str) -> None:
    counts = {"--used": "1", "--requested": "1", "--capacity": "1", option: value}
    arguments = [part for pair in counts.items() for part in pair]
    assert_one_line(memfit("plan", "request", *arguments), 2, option)


def test_a_scenario_is_answered_as_json(memfit: Memfit) -> None:
    run = memfit("plan", "wired", SERVER, "--json")
    assert (run.code, run.json["verdict"]) == (0, "waits")
    assert run.json["largest_limit_bytes"] == 13_726_000_000
    assert [t["outcome"] for t in run.json["tickets"]].count("gave_up") == 1


def test_a_plan_that_macos_rejects_exits_with_1_and_the_value_to_set(memfit: Memfit) -> None:
    run = memfit("plan", "wired", RAISED)
    assert run.code == 1
    assert "sudo sysctl iogpu.wired_limit_mb=20028" in run.out
    assert memfit("plan", "wired", RAISED, "--json").json["sysctl_mebibytes"] == 20028


def test_the_plot_draws_demand_waiting_and_limit_to_scale(memfit: Memfit) -> None:
    lines = memfit("plan", "wired", SERVER, "--plot").out.splitlines()
    plot = lines[lines.index(next(line for line in lines if "Demand over time" in line)) + 1 :]
    assert len(plot) == 11
    longest = next(line for line in plot if line.lstrip().startswith("5 s"))
    assert len(longest) <= 100
    assert longest.count("░") * 12_626 == pytest.approx(longest.count("█") * 5_080, rel=0.05)
    assert "│" in longest


def test_numbers_are_not_cut_on_a_narrow_terminal(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = memfit("plan", "wired", SERVER).out
    assert "…" not in out
    assert "13.8 GB  13.8 GB  13.8 GB" in out


def test_binary_units_are_shown_on_request(memfit: Memfit) -> None:
    out = memfit("plan", "wired", SERVER, "--units", "gib").out
    assert "12.8 GiB" in out
    assert " GB" not in out


def test_markdown_has_both_tables_and_the_plot(memfit: Memfit, tmp_path: Path) -> None:
    page = tmp_path / "plan.md"
    run = memfit("plan", "wired", SERVER, "--plot", "--format", "markdown", "-o", page)
    text = page.read_text(encoding="utf-8")
    assert (run.code, run.out) == (0, "")
    assert "| chat-3 | active | admitted | 2.0 GB | 3 s | 5 s | 8 s | 13 s |" in text
    assert text.count("```") == 2


def test_a_missing_scenario_gives_a_one_line_error(memfit: Memfit, tmp_path: Path) -> None:
    assert_one_line(memfit("plan", "wired", tmp_path / "none.yaml"), 2, "no such file")
    assert_one_line(memfit("plan", "wired", tmp_path), 2, "not a regular file")


def test_a_mistake_in_a_scenario_gives_a_one_line_error(memfit: Memfit, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SERVER.read_text().replace("14GB", "14G"))
    assert_one_line(memfit("plan", "wired", path), 2, "bad.yaml:6: policies.serving.cap", "14G")


def test_a_thousand_tickets_are_planned(memfit: Memfit, tmp_path: Path) -> None:
    head, tickets = SERVER.read_text().split("tickets:\n")
    assert tickets
    path = tmp_path / "crowd.yaml"
    path.write_text(
        head
        + "tickets:\n"
        + "".join(
            f"  - {{name: t{n}, policy: serving, size: {n % 14 + 1}GB, start: {n}s, runs: 3s}}\n"
            for n in range(1000)
        )
    )
    data = json.loads(memfit("plan", "wired", path, "--json").out)
    assert {t["outcome"] for t in data["tickets"]} == {"admitted"}
