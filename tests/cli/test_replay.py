"""``memfit replay``: traffic before a guard, from files and generated."""

import json
from pathlib import Path

from tests.cli.running import Memfit

LIMIT = ("--limit", "6GB", "--prefill-step-size", "512")


def test_generated_traffic_is_never_over_the_limit(memfit: Memfit, tmp_path: Path) -> None:
    page = tmp_path / "replay.html"
    run = memfit(
        *("replay", "qwen3-0.6b", *LIMIT, "--generate", "agents", "--requests", "40"),
        *("--clients", "12", "-o", page),
    )
    assert run.code == 0
    text = page.read_text()
    assert "Safe: 0 moments over the limit, 0 requests refused that fit alone" in text
    assert "Memory over the calls" in text


def test_recorded_traffic_is_replayed_with_sessions_and_longest_replies(
    memfit: Memfit, tmp_path: Path
) -> None:
    rows = [
        {"prompt_tokens": 3000, "completion_tokens": 90, "max_tokens": 4000, "session": "a"},
        {"prompt_tokens": 500, "completion_tokens": 10, "max_tokens": 512},
        {"prompt_tokens": 39_000, "completion_tokens": 1, "max_tokens": 1000},
        {"prompt_tokens": 3200, "completion_tokens": 40, "max_tokens": 4000, "session": "a"},
    ]
    file = tmp_path / "traffic.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    run = memfit(
        *("replay", "qwen3-0.6b", "--limit", "4GB", "--traffic", file, "--clients", "1", "--json")
    )
    assert run.code == 0
    found = json.loads(run.out)
    assert (found["requests"], found["over"], found["refused_though_fits"]) == (4, 0, 0)
    assert found["cached"] == 1
    (refused,) = found["refused"]
    assert refused["request"] == 3
    assert 3000 < refused["largest_prompt_tokens"] < 39_000


def test_a_row_that_replies_longer_than_it_may_is_refused(memfit: Memfit, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt_tokens": 5, "completion_tokens": 9, "max_tokens": 8}')
    run = memfit("replay", "qwen3-0.6b", *LIMIT, "--traffic", file)
    assert (run.code, "traffic.jsonl:1: max_tokens" in run.err) == (2, True)


def test_replay_needs_traffic_and_a_limit_above_the_weights(memfit: Memfit) -> None:
    assert memfit("replay", "qwen3-0.6b", *LIMIT).code == 2
    assert memfit("replay", "qwen3-0.6b", "--generate", "agents").code == 2
    run = memfit("replay", "qwen3-8b-4bit", "--limit", "2GB", "--generate", "agents")
    assert (run.code, "below the weights" in run.err) == (2, True)
    assert memfit("replay", "none.json", "--limit", "9GB", "--generate", "agents").code == 2
