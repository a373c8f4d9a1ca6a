"""Which models fit at once: every set by brute force, and the command line."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.plans.together.plan import _maximal, matrix
from tests.cli.running import Memfit

MODELS = ("qwen3-8b-4bit", "gemma-3-4b", "qwen3-14b-4bit", "qwen3-0.6b")


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 300))
def test_a_set_is_listed_exactly_when_it_fits_and_nothing_can_be_added(
    needs: list[int], room: int
) -> None:
    able = [index for index, need in enumerate(needs) if need <= room]
    listed = _maximal(able, lambda some: sum(needs[index] for index in some) <= room)
    assert len(set(listed)) == len(listed)
    for size in range(1, len(able) + 1):
        for some in combinations(able, size):
            used = sum(needs[index] for index in some)
            others = [needs[index] for index in able if index not in some]
            wanted = used <= room and all(used + other > room for other in others)
            assert (some in listed) == wanted


@given(st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True), max_size=3))
def test_a_matrix_is_yaml_whatever_the_names_are(sets: list[list[str]]) -> None:
    names = {name for models in sets for name in models}
    if any(not name.isprintable() for name in names):
        return
    read = yaml.safe_load(matrix(sets))["routing"]["router"]["settings"]["matrix"]
    letters = read["vars"] or {}
    assert set(letters.values()) == names
    written = (
        [[letters[letter] for letter in each.split(" & ")] for each in read["sets"].values()]
        if sets
        else []
    )
    assert written == sets


def test_the_sets_fit_and_what_is_unloaded_makes_room(memfit: Memfit, tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    run = memfit(
        "plan",
        "together",
        *MODELS,
        "--memory",
        "32GB",
        "--context",
        "8k",
        "--matrix",
        file,
        "--json",
    )
    assert run.code == 1
    plan = json.loads(run.out)
    room = plan["device"]["working_set_bytes"]
    needs = {model["name"]: model["needed_bytes"] for model in plan["models"]}
    assert plan["needed_bytes"] == sum(needs.values()) > room
    for each in plan["sets"]:
        assert sum(needs[name] for name in each["models"]) == each["needed_bytes"] <= room
        assert each["longest_prompt"] >= 8192
        for swap in each["swaps"]:
            left = set(each["models"]) - set(swap["unload"])
            assert sum(needs[name] for name in left) + needs[swap["to_load"]] <= room
    assert file.read_text() == plan["matrix"]


def test_a_mac_is_named_as_it_is_sold(memfit: Memfit) -> None:
    run = memfit("plan", "together", "qwen3-0.6b", "gemma-3-4b", "--memory", "32GB")
    assert "Mac with 32 GB, 26.8 GB working set" in run.out


def test_a_set_still_fits_at_its_longest_prompt_and_no_longer(memfit: Memfit) -> None:
    words = ("plan", "together", "qwen3-0.6b", "gemma-3-4b", "--memory", "24GB", "--json")
    (found,) = json.loads(memfit(*words, "--context", "2k").out)["sets"]
    longest = found["longest_prompt"]
    assert memfit(*words, "--context", str(longest)).code == 0
    assert memfit(*words, "--context", str(longest + 256)).code == 1


def test_each_command_has_its_bound_and_a_port_of_its_own(memfit: Memfit) -> None:
    words = ("--memory", "64GB", "--context", "8k", "--json")
    plan = json.loads(memfit("plan", "together", "qwen3-0.6b", "gemma-3-4b", *words).out)
    for port, model in enumerate(plan["models"], 8080):
        (command,) = model["commands"]
        assert command.endswith(f" --port {port}")
        flags = command.split(" --prefill-step-size ")[1].split(" --port")[0]
        sample = {"Qwen3-0.6B": "qwen3-0.6b"}.get(model["name"], "gemma-3-4b")
        served = json.loads(
            memfit(
                *("plan", "server", sample, *words, "--clients", "1"),
                *("--prefill-step-size", *flags.split()),
            ).out
        )
        assert model["peak_bytes"] + 64 * 10**6 == served["bound"]["needed_bytes"]
        assert model["held_bytes"] == served["held_bytes"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("qwen3-0.6b", "--memory", "32GB"), "give from 2 to 12 models"),
        (("qwen3-0.6b", "qwen3-0.6b", "--memory", "32GB"), "is named twice"),
        (("qwen3-0.6b", "gemma-3-4b"), "name the machine"),
        (("qwen3-0.6b", "gemma-3-4b", "--memory", "32GB", "--context", "64k"), "shorten it"),
    ],
)
def test_a_wrong_question_is_one_line(memfit: Memfit, words: tuple[str, ...], error: str) -> None:
    run = memfit("plan", "together", *words)
    assert (run.code, run.out) == (2, "")
    assert error in run.err
