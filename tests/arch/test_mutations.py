"""Configs with one key changed: the formula agrees with mlx-lm's class, or one of them refuses."""

import json
from itertools import islice
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the truth is mlx-lm's own classes")

from benchmarks.mutations import CASES, mutations, outcome

# Of thousands; prime numbers, so that all keys and changes have their turn.
EVERY, EVERY_IN_CI = 61, 5


def test_no_mutation_gives_a_silent_wrong_number() -> None:
    found = {each.name: outcome(each.config) for each in islice(mutations(), 0, None, EVERY)}
    assert [name for name, result in found.items() if result == "different"] == []
    # Most others are refused, as keys that the class requires are.
    assert list(found.values()).count("equal") > len(found) // 3


@pytest.mark.exhaustive
def test_no_mutation_of_many_gives_a_silent_wrong_number() -> None:
    sample = islice(mutations(), 1, None, EVERY_IN_CI)
    assert [each.name for each in sample if outcome(each.config) == "different"] == []


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("bailing_moe", "moe_router_enable_shared_expert"),
        ("recurrent_gemma", "tie_word_embeddings"),
    ],
)
def test_a_null_turns_a_flag_off_that_is_on_by_default(case: str, key: str) -> None:
    config: dict[str, Any] = json.loads((CASES / f"{case}.json").read_text())
    assert outcome(config | {key: None}) == "equal"
