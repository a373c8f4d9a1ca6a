"""The functions of `memfit` beside `estimate`: the same answers as the commands."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.estimators.guard.guard import Admit, Refuse, Wait
from memfit.estimators.guard.state import Request, Row, State
from memfit.estimators.guard.tabulate import make_card
from memfit.settings import workload


def test_dir_shows_the_documented_names_alone() -> None:
    assert dir(memfit) == sorted(memfit.__all__)


def test_signatures_have_every_keyword() -> None:
    expected: dict[Callable[..., Any], set[str]] = {
        memfit.estimate: {"device", "context", "quantize", "kv_bits", "cached_tokens", "memory"},
        memfit.open: {"quantize", "runtime", "mlx_version"},
        memfit.OpenModel.at: {"context", "plot", "prefill_step", "cached_tokens"},
        memfit.OpenModel.on: {"device", "memory", "ranks"},
        memfit.OpenModel.peak: {"context", "prefill_step"},
        memfit.fits: {"device", "use", "min_context", "working_set"},
        memfit.compare: {"models", "device", "kv_bits"},
        memfit.plan_server: {"clients", "decode_concurrency", "quantize"},
        memfit.guard: {"limit", "device", "prefill_step_size", "adapter"},
        memfit.tune: {"memory_limit", "kv_bits"},
    }
    for function, keywords in expected.items():
        found = inspect.signature(function).parameters
        assert keywords <= found.keys()
        assert not any(each.kind is each.VAR_KEYWORD for each in found.values())


def test_a_guard_decides_for_an_opened_model() -> None:
    guard = memfit.guard(memfit.open("qwen3-0.6b").on("m4-pro-24"), "4GB")
    assert isinstance(guard.preflight(2000, 500), Admit)
    assert isinstance(guard.preflight(30_000, 500), Refuse)
    running = State(decoding=tuple(Row(6000, 0, 500, number) for number in range(2)))
    found = guard.admit(Request(6000, 500), running)
    assert isinstance(found, Wait)
    assert guard.chunk(4096, 16_000, running) < 4096
    assert guard.store(500, running) in (True, False)
    assert memfit.guard("qwen3-0.6b", device="m4-pro-24").limit_bytes == 19_005_665_280


def test_a_guard_reads_a_card_and_refuses_an_altered_one(tmp_path: Path) -> None:
    sized = memfit.open("qwen3-0.6b").on("m4-max-64").resolved(workload(1, {})).sized
    card = make_card(sized, questions=100).to_json()
    file = tmp_path / "memory.json"
    file.write_text(card)
    guard = memfit.guard(file, "20GB")
    assert isinstance(guard.preflight(8000, 500), Admit)
    file.write_text(card.replace('"unit":16384', '"unit":8192'))
    with pytest.raises(memfit.InputError, match="make the card again"):
        memfit.guard(file, "20GB")


def test_models_are_compared_listed_and_planned() -> None:
    compared = memfit.compare("qwen3-0.6b", "qwen3-4b-4bit", device="m4-max-64", context="8k")
    assert len(compared.models) == 2
    plan = memfit.plan_server(
        "qwen3-0.6b", device="m4-max-64", context="2k", decode_concurrency=2, clients=2
    )
    assert plan.verdict == "fits"
    listed = memfit.fits("m4-pro-24", context="8k", rows=3)
    assert listed.fitting >= 3
    with pytest.raises(memfit.InputError, match="two or more"):
        memfit.compare("qwen3-0.6b")
