"""Usage profiles: reading them, and their coverage."""

import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.plans.experts.routing import (
    RoutingProfile,
    adaptive_capacities,
    missed_by_chance,
    read_profile,
)
from memfit.estimators.weights.expert_slots import ExpertLayer

LAYERS = tuple(ExpertLayer(index, 4, 1, True, 10) for index in (1, 3))
COUNTS = st.tuples(*[st.integers(0, 50)] * 4).filter(any)


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content",
    [
        {"1": {"0": 5, "3": 1}, "3": {"2": 9}},
        {"layers": {"1": {"0": 5, "3": 1}, "3": {"2": 9}}},
        {
            "layers": {
                "1": {"activation_counts": {"0": 5, "3": 1}},
                "3": {"activation_counts": {"2": 9}, "universal": [2]},
            }
        },
    ],
)
def test_three_profile_formats_give_the_same_counts(tmp_path: Path, content: object) -> None:
    assert read_profile(written(tmp_path, content), LAYERS).counts == ((5, 0, 0, 1), (0, 0, 9, 0))


def test_an_expert_used_by_half_of_the_prompts_is_universal(tmp_path: Path) -> None:
    # mlx-moe pins from half of the prompts on.
    content = {"num_prompts": 10, "layers": {"1": {"0": 5, "3": 4}, "3": {"2": 9, "1": 10}}}
    assert read_profile(written(tmp_path, content), LAYERS).universal() == (1, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ({"1": {"0": 1}}, "layer 3 is missing"),
        ({"1": {"0": 1}, "3": {"4": 1}}, "3.4: no such expert; the layer has 4"),
        ({"1": {"0": 1}, "3": {"-1": 1}}, "3.-1: no such expert"),
        ({"1": {"0": 1}, "3": {"0": -1}}, f"3.0: expected 0 to {2**63 - 1}, got -1"),
        ({"1": {"0": 1}, "3": {"0": 1.5}}, "3.0: expected an integer, got 1.5"),
        ({"1": {"0": 1}, "3": {"0": True}}, "3.0: expected an integer, got True"),
        ({"1": {"0": 1}, "3": {}}, "no expert was used"),
        ({"1": {"0": 1}, "3": {"0": 1}, "2": {"0": 1}}, "layer 2 has no routed experts"),
        ({"num_prompts": 0, "1": {"0": 1}, "3": {"0": 1}}, "num_prompts"),
        ({"layers": [1]}, "layers: expected a mapping"),
        ('{"1": {"0": 1, "0": 2}, "3": {"0": 1}}', "'0' twice"),
    ],
)
def test_an_impossible_profile_is_rejected(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputError, match=r"profile\.json") as error:
        read_profile(written(tmp_path, content), LAYERS)
    assert message in str(error.value)


@given(st.lists(COUNTS, min_size=1, max_size=3), st.integers(0, 4))
def test_keeping_the_most_used_experts_misses_least(
    counts: list[tuple[int, ...]], capacity: int
) -> None:
    profile = RoutingProfile(tuple(counts))
    capacities = [capacity] * len(counts)
    missed = profile.missed(capacities)
    assert all(
        own <= chance for own, chance in zip(missed, missed_by_chance(4, capacities), strict=True)
    )
    more = profile.missed([min(4, capacity + 1)] * len(counts))
    assert all(after <= before for before, after in zip(missed, more, strict=True))


@given(st.tuples(COUNTS, COUNTS), st.integers(20, 80))
def test_no_other_choice_of_the_same_bytes_misses_less(
    counts: tuple[tuple[int, ...], tuple[int, ...]], budget: int
) -> None:
    profile = RoutingProfile(counts)
    chosen = adaptive_capacities(profile, LAYERS, budget)
    assert sum(chosen) * 10 <= budget
    others = [pair for pair in product(range(1, 5), repeat=2) if sum(pair) * 10 <= budget]
    least = min(sum(profile.missed(pair), Fraction()) for pair in others)
    assert sum(profile.missed(chosen), Fraction()) == least


def moved_slots(counts: Sequence[tuple[int, ...]], slots: int, floor: int) -> list[int]:
    """mlx-moe's documented rule, in exact fractions and without regard to speed."""
    experts = len(counts[0])
    kept = [slots // len(counts)] * len(counts)
    for layer in range(len(counts)):
        kept[layer] += min(slots - sum(kept), experts - kept[layer])

    def miss_rate(layer: int, capacity: int) -> Fraction:
        covered = sum(sorted(counts[layer], reverse=True)[:capacity])
        return 1 - Fraction(covered, sum(counts[layer]))

    def cost(layer: int) -> Fraction:
        if kept[layer] <= floor:
            return Fraction(2)  # more than any share
        return miss_rate(layer, kept[layer] - 1) - miss_rate(layer, kept[layer])

    def utility(layer: int) -> Fraction:
        return miss_rate(layer, kept[layer]) - miss_rate(layer, kept[layer] + 1)

    while True:
        donor = min(range(len(counts)), key=cost)
        recipient = max(range(len(counts)), key=utility)
        if utility(recipient) <= cost(donor):
            return kept
        kept[donor] -= 1
        kept[recipient] += 1


# Few different counts: most gains equal another layer's.
TIES = st.lists(st.tuples(*[st.integers(0, 3)] * 6).filter(any), min_size=2, max_size=5)


@given(TIES, st.integers(1, 6), st.data())
def test_ties_are_broken_as_in_mlx_moe(
    counts: list[tuple[int, ...]], top_k: int, data: st.DataObject
) -> None:
    layers = tuple(ExpertLayer(index, 6, top_k, True, 10) for index in range(len(counts)))
    slots = data.draw(st.integers(top_k * len(counts), 6 * len(counts)))
    chosen = adaptive_capacities(RoutingProfile(tuple(counts)), layers, 10 * slots + 9)
    assert list(chosen) == moved_slots(counts, slots, top_k)


@pytest.mark.parametrize(("slots", "chosen"), [(64, (32, 32)), (65, (33, 32)), (127, (64, 63))])
def test_uniform_layers_keep_equal_capacities(slots: int, chosen: tuple[int, int]) -> None:
    layers = tuple(ExpertLayer(index, 64, 1, True, 10) for index in range(2))
    profile = RoutingProfile(((5,) * 64, (5,) * 64))
    assert adaptive_capacities(profile, layers, 10 * slots) == chosen


@given(TIES, st.lists(st.integers(1, 9), min_size=5, max_size=5), st.integers(0, 60))
def test_slots_of_different_sizes_stay_within_the_budget(
    counts: list[tuple[int, ...]], sizes: list[int], extra: int
) -> None:
    pairs = zip(counts, sizes, strict=False)
    layers = [ExpertLayer(i, 6, 2, True, size) for i, (_, size) in enumerate(pairs)]
    budget = sum(2 * layer.slot_bytes for layer in layers) + extra
    profile = RoutingProfile(tuple(counts))
    chosen = adaptive_capacities(profile, layers, budget)
    taken = sum(n * layer.slot_bytes for n, layer in zip(chosen, layers, strict=True))
    assert taken <= budget
    assert all(2 <= capacity <= 6 for capacity in chosen)
    each = min(6, budget // sum(layer.slot_bytes for layer in layers))
    uniform = sum(profile.missed([each] * len(layers)), Fraction())
    assert sum(profile.missed(chosen), Fraction()) <= uniform
