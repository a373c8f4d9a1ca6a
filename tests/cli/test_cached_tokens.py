"""``--cached-tokens``: every command that takes it gives one answer."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import write_policy
from tests.cli.running import Memfit

MODEL, OTHER = "qwen3-4b-4bit", "qwen3-8b-4bit"
OPTIONS = ("--device", "m4-max-64", "--context", "20k", "--cached-tokens", "18k", "--json")


def test_every_command_gives_one_peak(memfit: Memfit) -> None:
    one = memfit("estimate", MODEL, *OPTIONS).json
    compared = memfit("compare", MODEL, OTHER, *OPTIONS).json
    planned = memfit("plan", "context", MODEL, *OPTIONS).json
    assert one["workload"]["cached_tokens"] == 18 * 1024
    assert compared["models"][0]["needed_bytes"] == one["needed_bytes"]
    assert planned["fit"]["required_bytes"] == one["needed_bytes"]
    assert all(cell["context_tokens"] > 18 * 1024 for cell in planned["matrix"])


def test_the_gate_counts_the_stored_cache(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = memfit("estimate", MODEL, *OPTIONS).json["peak_bytes"]
    write_policy(tmp_path, it=_target(one - 1, "18k"))
    run = memfit("gate", "--format", "json")
    assert run.code == 1
    # It is that of the largest prompt within the target's.
    (report,) = run.json["targets"]
    assert one <= report["checks"][0]["figure"] < 1.02 * one


def test_a_policy_with_as_many_cached_tokens_as_the_prompt_has_is_refused(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_policy(tmp_path, it=_target(10**10, "20k"))
    run = memfit("gate")
    assert run.code == 2
    assert "cached tokens 20480: must be fewer than the 20480 tokens" in run.err


def test_the_first_screen_says_how_many_are_cached(memfit: Memfit) -> None:
    text = memfit("estimate", MODEL, *OPTIONS[:-1]).out
    assert "20480 tokens (18432 cached), no reply" in text
    # A whole prompt is what mlx_lm.generate would run.
    assert "mlx_lm.generate" not in text


def _target(most_bytes: int, cached: str) -> dict[str, Any]:
    workload = {"context": "20k", "cached_tokens": cached}
    return {
        "model": MODEL,
        "device": "m4-max-64",
        "workload": workload,
        "limits": {"peak": f"{most_bytes}B"},
    }
