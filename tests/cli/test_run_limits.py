"""What ends a run though its bytes fit is in every output."""

import re
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
    ("question", "verdict", "why", "advice"),
    [
        (
            LONG,
            "tight",
            "65536",
            ("display sleep", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1", "smaller prefill", "float16"),
        ),
        (REPLY, "fits", "17207", ()),
    ],
)
def test_the_reason_is_on_line_one_and_the_advice_below_in_its_order(
    memfit: Memfit, question: tuple[str, ...], verdict: str, why: str, advice: tuple[str, ...]
) -> None:
    run = memfit("estimate", *question)
    assert run.code == 0
    assert verdict in first_line(run.out)
    assert why in first_line(run.out)
    assert "Nothing to change" not in run.out
    text = " ".join(run.out.split())
    places = [text.index(remedy) for remedy in advice]
    assert places == sorted(places)
    assert text.count(REASON) == bool(advice)


@pytest.mark.exhaustive(daily=True)
def test_an_unknown_chip_fits_with_what_is_open(memfit: Memfit) -> None:
    run = memfit("estimate", *MODEL, "--memory", "64GB", "--context", "128k")
    assert "fits" in first_line(run.out)
    assert "On M1 and M2 macOS may end a prompt beyond 65536 tokens" in first_line(run.out)
    assert "Nothing to change" not in run.out


@pytest.mark.exhaustive
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


SHORT = (*MODEL, "--device", "m2-max-64")
REASON = "macOS may end a prompt beyond 65536 tokens"


@pytest.mark.parametrize("command", quick(["estimate", "plan context"], ("plan context",)))
def test_a_longest_prompt_that_may_end_is_marked_with_the_reason(
    memfit: Memfit, command: str
) -> None:
    text = memfit(*command.split(), *SHORT).out
    assert re.search(r"(256k|262144 tokens)(@1024)? !|2[0-9]{5} tokens !", text)
    assert REASON in " ".join(text.split())
    newer = memfit(*command.split(), *MODEL, "--device", "m5-max-64").out
    assert REASON not in " ".join(newer.split())


def test_a_comparison_marks_the_longest_context(memfit: Memfit) -> None:
    question = ("mistral-nemo-12b", "--quantize", "4", "--device", "m2-max-64")
    text = memfit("compare", question[0], *question).out
    assert re.search(r"Longest context +[0-9]+ tokens !", text)
    assert REASON in " ".join(text.split())


def test_a_server_for_one_long_prompt_says_why_it_is_tight(memfit: Memfit) -> None:
    server = ("--clients", "1", "--prompt-cache-size", "1")
    run = memfit("plan", "server", *MODEL, "--device", "m2-max-64", "--context", "100k", *server)
    (verdict,) = re.findall(r"^Tight in any order.*?\n\n", run.out, re.MULTILINE | re.DOTALL)
    assert REASON in " ".join(verdict.split())
    assert "mlx_lm.server" in run.out
    assert "No flags" not in run.out
    assert "1 request open at a time" in run.out


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


def test_the_gate_warns_of_a_context_that_it_requires(memfit: Memfit, tmp_path: Path) -> None:
    target = {
        "model": "qwen3.6-35b-a3b",
        "quantize": 6,
        "device": "m2-max-64",
        "workload": {"prompt_tokens": 4096, "max_tokens": 0},
    }
    for context, warned in (("64k", False), ("100k", True)):
        write_policy(tmp_path, long={**target, "limits": {"context": context}})
        run = memfit("gate", "--policy", tmp_path / "memfit.yaml")
        assert run.code == 0
        assert (REASON in " ".join(run.out.split())) == warned


@pytest.mark.exhaustive(daily=True)
def test_fits_marks_the_longest_prompts_and_says_why_once(memfit: Memfit) -> None:
    run = memfit("fits", "--device", "m2-max-64", "--prompt-tokens", "70k")
    assert len(re.findall(r"[0-9]+k(@[0-9]+)? ! ", run.out)) > 10
    assert " ".join(run.out.split()).count(REASON) == 1
