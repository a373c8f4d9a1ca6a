"""Configs with one key changed: the formula agrees with mlx-lm's class, or one of them refuses."""

import json
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the truth is mlx-lm's own classes")

from benchmarks.mutations import CASES, mutations, outcome
from memfit.estimators.arch.registry import build_model
from memfit.estimators.weights.derived import derive
from memfit.estimators.weights.quantization_plan import declared

SAMPLES = Path(__file__).parents[2] / "sample_configs"
# Of thousands; prime numbers, so that all keys and changes have their turn.
EVERY, EVERY_IN_CI = 701, 11


def weights(config: dict[str, Any]) -> int:
    model = build_model(config, "config.json")
    return derive(model, declared(config, model, "config.json").plan).loaded_bytes


def test_no_mutation_gives_a_silent_wrong_number() -> None:
    every = chain(mutations(), mutations(SAMPLES))
    found = {each.name: outcome(each.config) for each in islice(every, 0, None, EVERY)}
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
        ("gemma3", "tie_word_embeddings"),
    ],
)
def test_a_null_turns_a_flag_off_that_is_on_by_default(case: str, key: str) -> None:
    config: dict[str, Any] = json.loads((CASES / f"{case}.json").read_text())
    assert outcome(config | {key: None}) == "equal"


@pytest.mark.parametrize("value", [None, False, True])
def test_a_section_says_whether_the_head_is_tied_where_the_root_does_not(value: object) -> None:
    config: dict[str, Any] = json.loads((CASES / "gemma3.json").read_text())
    section = {**config["text_config"], "tie_word_embeddings": value}
    assert outcome(config | {"text_config": section}) == "equal"
    head = weights(config | {"text_config": section}) - weights(config)
    assert head == (0 if value else 288 * 128 * 2)


def test_a_null_for_a_module_leaves_it_unquantised_as_false_does() -> None:
    config: dict[str, Any] = json.loads((CASES / "llama.json").read_text())
    packed = {"bits": 4, "group_size": 32}
    with_null, with_false = (
        config | {"quantization": {**packed, "lm_head": value}} for value in (None, False)
    )
    assert outcome(with_null) == outcome(with_false) == "equal"
    assert weights(with_null) == weights(with_false) != weights(config | {"quantization": packed})
