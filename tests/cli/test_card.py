"""``memfit card``: made, checked and evaluated from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import Memfit

MAKE = ("card", "qwen3-0.6b", "--device", "m4-max-64", "--questions", "100")


# tests/guard makes, checks and evaluates cards in the quick set; each takes seconds.
@pytest.mark.exhaustive(daily=True)
def test_a_card_is_made_checked_and_evaluated(memfit: Memfit, tmp_path: Path) -> None:
    file, evaluator = tmp_path / "memory.json", tmp_path / "memory_card.py"
    assert memfit(*MAKE, "-o", str(file)).code == 0
    assert "\n" not in file.read_text().strip()
    run = memfit("card", "--verify", str(file))
    assert run.code == 0
    assert "Qwen3-0.6B: memory card" in run.out
    assert "below memfit's own figure in" in run.out
    assert memfit("card", "--evaluator", "python", "-o", evaluator).out == ""
    done = subprocess.run([sys.executable, evaluator, file], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"0 wrong\n")
    card = json.loads(file.read_text())
    card["vectors"][0][4] += 1
    file.write_text(json.dumps(card))
    refused = memfit("card", "--verify", str(file))
    assert refused.code == 2
    assert "make the card again with memfit card" in refused.err


def test_a_card_is_made_checked_or_evaluated_but_only_one_of_them(memfit: Memfit) -> None:
    run = memfit("card", "qwen3-4b-4bit", "--verify", "memory.json")
    assert (run.code, "give one of them" in run.err) == (2, True)


def test_a_card_needs_a_machine_and_a_described_model(memfit: Memfit, tmp_path: Path) -> None:
    assert memfit("card", "qwen3-0.6b").code == 2
    assert memfit("card", "--verify", str(tmp_path / "none.json")).code == 2
    assert memfit("card", "llama-4-scout", "--device", "m4-max-64").code == 3
