"""What ends a run though its bytes fit is in every output."""

from pathlib import Path

import pytest

from tests.cli.gating import write_policy
from tests.cli.running import Memfit
from tests.selection import quick

MODEL = ("qwen3.6-35b-a3b", "--quantize", "6")
LONG = (*MODEL, "--device", "m2-max-64", "--context", "128k")
REPLY = (*MODEL, "--device", "m4-max-64", "--prompt-tokens", "4k", "--max-tokens", "20k")


def first_line(text: str) -> str:
    """The first sentence of a screen on one line."""
    return " ".join(text.split("\n131072")[0].split("\n4096")[0].split())


@pytest.mark.parametrize(
    ("question", "verdict", "why"), [(LONG, "tight", "65536"), (REPLY, "fits", "17207")]
)
def test_the_reason_is_on_line_one_and_never_nothing_to_change(
    memfit: Memfit, question: tuple[str, ...], verdict: str, why: str
) -> None:
    run = memfit("estimate", *question)
    assert run.code == 0
    assert verdict in first_line(run.out)
    assert why in first_line(run.out)
    assert "Nothing to change" not in run.out


def test_an_unknown_chip_fits_with_what_is_open(memfit: Memfit) -> None:
    run = memfit("estimate", *MODEL, "--memory", "64GB", "--context", "128k")
    assert "fits" in first_line(run.out)
    assert "On M1 and M2 macOS may end a prompt beyond 65536 tokens" in first_line(run.out)
    assert "Nothing to change" not in run.out


@pytest.mark.parametrize(
    "command",
    quick(["estimate", "compare qwen3-8b-4bit", "plan context", "plan server"], ("estimate",)),
)
def test_every_command_and_format_says_it(memfit: Memfit, command: str) -> None:
    json = memfit(*command.split(), *LONG, "--format", "json")
    assert "macOS may end" in json.out
    assert json.json
    for format_ in ("table", "markdown", "html"):
        text = memfit(*command.split(), *LONG, "--format", format_).out
        assert "macOS may end" in " ".join(text.split()), format_


def test_the_limits_are_rows_with_their_sources(memfit: Memfit) -> None:
    rows = {row["name"]: row for row in memfit("estimate", *LONG, "--json").json["limits"]}
    assert list(rows) == ["largest_buffer", "gpu_watchdog", "buffer_count"]
    assert rows["gpu_watchdog"]["verdict"] == "tight"
    assert all(row["source"] and row["unit"] for row in rows.values())


def test_the_gate_warns_in_its_report(memfit: Memfit, tmp_path: Path) -> None:
    write_policy(
        tmp_path,
        long={
            "model": "qwen3.6-35b-a3b",
            "quantize": 6,
            "device": "m2-max-64",
            "workload": {"prompt_tokens": 131072, "max_tokens": 0},
            "limits": {"peak": "100%"},
        },
    )
    run = memfit("gate", "--policy", tmp_path / "memfit.yaml", "--format", "json")
    assert run.code == 0
    (target,) = run.json["targets"]
    assert "gpu-watchdog" in [note["code"] for note in target["notes"]]
    text = memfit("gate", "--policy", tmp_path / "memfit.yaml").out
    assert "macOS may end" in " ".join(text.split())
