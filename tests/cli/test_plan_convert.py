"""``memfit plan convert``, and what an estimate says of the conversions that it advises."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import config_of
from tests.cli.running import Memfit


def test_a_conversion_that_does_not_fit_prints_no_command(memfit: Memfit) -> None:
    run = memfit(*"plan convert qwen3-235b-a22b --quantize 4 --memory 16GB --json".split())
    assert (run.code, run.json["conversion"]["verdict"], run.json["commands"]) == (
        1,
        "exceeds",
        [],
    )
    run = memfit(*"plan convert qwen3-235b-a22b --quantize 4 --memory 64GB --json".split())
    assert run.json["commands"]


@pytest.mark.parametrize("format_", ["table", "markdown", "html"])
def test_a_plan_says_what_is_downloaded_written_and_in_memory(memfit: Memfit, format_: str) -> None:
    run = memfit(*f"plan convert llama-3.1-70b --quantize 4 --format {format_}".split())
    assert run.code == 0
    for text in ("141.2 GB", "39.7 GB", "5.3 GB"):
        assert text in run.out


def _converting(run: Any) -> Iterator[dict[str, Any]]:
    for action in run.json["actions"]:
        if any("mlx_lm.convert" in command for command in action["commands"]):
            yield action


def test_every_advised_conversion_says_what_it_takes(memfit: Memfit) -> None:
    run = memfit("llama-3.1-70b", "--device", "m4-max-64", "--json")
    actions = list(_converting(run))
    assert actions
    for action in actions:
        assert action["conversion"]["verdict"] in ("fits", "tight")
    best = actions[0]["conversion"]
    text = memfit("llama-3.1-70b", "--device", "m4-max-64").out
    assert f"(converting takes {best['peak_bytes'] / 1e9:.1f}" in " ".join(text.split())
    assert "to download" in text
    assert "conversion" not in memfit("qwen3-0.6b", "--memory", "16GB", "--json").json["actions"][0]


def test_a_machine_without_room_for_the_conversion_is_told_no_command(
    memfit: Memfit, tmp_path: Path
) -> None:
    # One matrix is most of the model: read and packed it takes far more than the packed one.
    config = config_of("llama") | {"hidden_size": 512, "vocab_size": 2_500_000}
    config |= {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(tmp_path / "config.json")
    machine = ("--memory", "8GB", "--prompt-tokens", "64")
    run = memfit(path, "--quantize", "4", *machine, "--json")
    chosen = run.json["actions"][run.json["best_action"]]
    assert (chosen["conversion"]["verdict"], chosen["commands"]) == ("exceeds", [])
    text = " ".join(memfit(path, "--quantize", "4", *machine).out.split())
    assert "this Mac has no room for it" in text
