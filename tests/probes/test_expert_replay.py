"""A replay of recorded routing misses and reads what a run of the model did."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import InputError
from memfit.estimators.plans.experts.recording import (
    KEY,
    Recording,
    read_recording,
    with_recording,
)
from memfit.estimators.plans.experts.replay import Replay
from memfit.estimators.plans.experts.routing import (
    ChosenSlots,
    RoutingProfile,
    chosen_slots,
    profile_text,
)
from memfit.estimators.plans.experts.slot_table import SWAPS_PER_LAYER, LcpTable, lcp_priority
from memfit.estimators.weights.expert_slots import ExpertLayer
from memfit.probes.experts.points import profile_of, rows_of
from tests.probes.test_expert_slots import RUN, case, runner, slots_of
from tests.selection import quick

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
__all__ = ["case"]  # a fixture
CLASSES = ["qwen3_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss"]


def recorded(full: Any, order: tuple[int, ...]) -> Recording:
    whole = runner(full.path, mode="full")
    whole.load()
    runs = []
    for prompt in range(2):
        whole.choose(prompt)
        runs.append(whole.record(RUN))
    return Recording(full.routing[0].top_k, tuple(runs), order, warm_up=1)


@pytest.mark.parametrize("name", quick(CLASSES, ["qwen3_moe"]))
def test_the_replay_of_a_capacity_is_what_a_run_that_reads_missed(case: Any, name: str) -> None:
    full, order = case(name, plants_routers=True), (0, 0, 1, 0)
    recording, layers = recorded(full, order), rows_of(full.layers, full.routing)
    replay = Replay(profile_of(full.routing, layers, 2), recording, layers)
    for capacity in sorted({layers[0].top_k, layers[0].experts - 1}):
        for pinned in ((), tuple(range(capacity - layers[0].top_k))):
            kept = tuple(range(capacity))
            slots = [ChosenSlots(kept, pinned, capacity)] * len(layers)
            found = slots_of(full.path, capacity, "load", len(layers))
            for each in found._steps.layers:  # type: ignore[union-attr]
                each.slots.pinned = frozenset(pinned)
            measured = dict.fromkeys(("tokens", "uses", "misses", "reads", "read_bytes"), 0)
            for place, prompt in enumerate(order):
                found.choose(prompt)
                run = found.run(RUN, None)
                for key in measured if place else ():
                    measured[key] += run.value(f"decode_{key}") or 0
            assert measured["misses"] > 0
            assert replay.of("pinned", slots)._asdict() == measured, (capacity, pinned)


@pytest.mark.parametrize("name", quick(CLASSES, ["qwen3_moe"]))
def test_the_replay_of_swapping_is_what_a_run_that_swapped_missed(case: Any, name: str) -> None:
    full = case(name, plants_routers=True)
    layers, order = rows_of(full.layers, full.routing), (0, 1, 0, 1)
    capacity = layers[0].top_k
    found = slots_of(full.path, capacity, "swap", len(layers))
    runs, counts = [], found._steps.counts  # type: ignore[union-attr]
    for prompt in order:
        found.choose(prompt)
        runs.append(found.record(RUN))
        if len(runs) == 1:
            counts["decode"].clear()
    slots = [ChosenSlots(tuple(range(capacity)), (), capacity)] * len(layers)
    replay = Replay(
        profile_of(full.routing, layers, 2),
        Recording(layers[0].top_k, tuple(runs), tuple(range(len(order))), warm_up=1),
        layers,
    )
    replayed = replay.of("swap", slots)
    assert replayed.misses > 0
    assert replayed._asdict() == {key: counts["decode"][key] for key in replayed._fields}


def test_a_run_that_swaps_reads_what_was_missing_and_misses_less(case: Any) -> None:
    full = case("qwen3_moe")
    top_k = full.routing[0].top_k
    skipping, swapping = (
        slots_of(full.path, top_k, policy, len(full.layers)) for policy in ("skip", "swap")
    )
    runs = [each.run(RUN, None) for each in (skipping, swapping) for _ in range(2)]
    assert (runs[1].value("decode_reads") or 0) == 0
    assert runs[3].value("decode_reads")
    assert full.agreement(swapping).tokens > 0


# mlx-moe: frequency * 0.25^(age / 128), the lowest leaves, at most ten in a layer at once.
def test_priority_is_a_quarter_after_128_updates() -> None:
    assert (lcp_priority(100, 0), lcp_priority(100, 64), lcp_priority(100, 128)) == (100, 50, 25)
    assert lcp_priority(1, 0) > lcp_priority(3, 128)


def test_the_coldest_unpinned_expert_leaves_for_one_that_was_missing() -> None:
    table = LcpTable((0, 1, 2), pinned=(0,))
    table.count({1, 5})
    assert table.swap({1, 5}) == [(5, 2)]
    assert table.slot_of == {0: 0, 1: 1, 5: 2}
    assert table.swap({1, 5}) == []
    table.count({5, 7, 8})
    assert table.swap({5, 7, 8}) == [(7, 1)]  # 0 is pinned, 5 is requested: one slot for two


def test_a_layer_swaps_at_most_ten_at_once() -> None:
    table, wanted = LcpTable(tuple(range(16))), set(range(16, 32))
    table.count(wanted)
    assert len(table.swap(wanted)) == SWAPS_PER_LAYER


ROWS = tuple(ExpertLayer(index, 4, 1, False, 10) for index in range(2))
PROFILE = RoutingProfile(((5, 3, 1, 1), (4, 4, 1, 1)), 2, ((2, 1, 1, 1), (1, 1, 1, 1)))
RECORDING = {
    "top_k": 1,
    "runs": [{"calls": [2, 1, 1, 1], "choices": [[0, 1, 2, 2, 0], [0, 0, 3, 3, 3]]}],
    "order": [0],
    "warm_up": 0,
}


@pytest.fixture
def recording_file(tmp_path: Path) -> Path:
    path = tmp_path / "routing.json"
    top = json.loads(profile_text(PROFILE, ROWS, "qwen3_moe", 10))
    path.write_text(json.dumps({**top, KEY: RECORDING}))
    return path


def test_every_policy_misses_what_its_rule_says(recording_file: Path) -> None:
    profile, recording = read_recording(recording_file, ROWS, "qwen3_moe")
    assert profile == PROFILE
    replay = Replay(profile, recording, ROWS)
    # Decoding wants 2, 2, 0 and 3, 3, 3; two slots hold 0, which is pinned, and 1. mlx-moe updates
    # once, before the third token: the first layer has no cold expert, the second replaces 1 by 3.
    expected = {"static": (5, 0), "lru": (3, 3), "pinned": (2, 2), "swap": (4, 1)}
    found = {policy: replay.at(policy, 2) for policy in expected}  # type: ignore[arg-type]
    assert {policy: (each.misses, each.reads) for policy, each in found.items()} == expected
    assert all((each.tokens, each.uses) == (3, 6) for each in found.values())
    assert found["lru"].read_bytes == 30
    assert replay.at("lru", 4).misses == 0


def test_a_recording_is_also_a_profile_and_reads_back(recording_file: Path) -> None:
    _, recording = read_recording(recording_file, ROWS, "qwen3_moe")
    text = with_recording(profile_text(PROFILE, ROWS, "qwen3_moe", 10), recording)
    assert json.loads(text) == json.loads(recording_file.read_text())
    assert len(chosen_slots(PROFILE, (1, 3), ROWS)[1].kept) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"top_k": 2}, "a token has 2 experts there, 1 in this model"),
        ({"order": []}, "warm_up: there is no run after it"),
        ({"order": [1]}, "order: expected places from 0 to 0"),
        ({"warm_up": 1}, "warm_up: there is no run after it"),
        ({"runs": [{"calls": [1], "choices": [[0]]}]}, "runs[0]: expected calls with tokens"),
        ({"runs": [{"calls": [0], "choices": [[], []]}]}, "runs[0]: expected calls with tokens"),
        ({"runs": [{"calls": [1], "choices": [[0], [9]]}]}, "layer 1: expected 1 experts from 0"),
        ({"runs": [{"calls": [2], "choices": [[0], [0]]}]}, "layer 0: expected 2 experts from 0"),
        ({"runs": [{"calls": "x", "choices": []}]}, "calls"),
        ({"what": 1}, "what: unknown key"),
    ],
)
def test_a_damaged_recording_is_refused_by_key(
    recording_file: Path, change: dict[str, Any], error: str
) -> None:
    top = json.loads(recording_file.read_text())
    recording_file.write_text(json.dumps({**top, KEY: {**RECORDING, **change}}))
    with pytest.raises(InputError) as raised:
        read_recording(recording_file, ROWS, "qwen3_moe")
    assert error in str(raised.value)
    assert "routing.json" in str(raised.value)


def test_a_profile_without_a_recording_is_refused(recording_file: Path) -> None:
    recording_file.write_text(profile_text(PROFILE, ROWS, "qwen3_moe", 10))
    with pytest.raises(InputError, match="memfit tune experts --record FILE writes it"):
        read_recording(recording_file, ROWS, "qwen3_moe")
