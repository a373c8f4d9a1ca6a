"""Routing profiles: how often each expert was used, and the share that slots cover."""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.files import read_whole
from memfit.estimators.base.reading.section import Section, json_section
from memfit.estimators.base.reading.values import MAX_FIGURE
from memfit.estimators.plans.experts.expert_slots import ExpertLayer

# 1000 layers of 1000 experts; a name and a count take about 20 bytes.
_MOST_VALUES = 2_000_000
_MOST_BYTES = 32 * 10**6
# mlx-moe stops moving slots for a gain of 1e-9 of a layer's uses or less.
LEAST_GAIN = 10**9
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


class RoutingProfile(Struct, frozen=True):
    """How often each expert was used."""

    counts: tuple[tuple[int, ...], ...]
    """One tuple per layer with experts."""
    prompts: int | None = None
    """Number of prompts, when a count is the number of prompts that used the expert."""

    def universal(self) -> tuple[int, ...]:
        """Return for each layer how many experts at least half of the prompts use.

        Source: mlx-moe, upgrade_to_predictive_with_pinning, which pins them.

        >>> RoutingProfile(((9, 5, 4, 0),), prompts=10).universal()
        (2,)
        """
        least = self.prompts
        if least is None:
            return tuple(0 for _ in self.counts)
        return tuple(sum(2 * count >= least for count in layer) for layer in self.counts)

    def used(self) -> tuple[int, ...]:
        """Return for each layer how many experts were used at all."""
        return tuple(sum(count > 0 for count in layer) for layer in self.counts)

    def missed(self, capacities: Sequence[int]) -> tuple[Fraction, ...]:
        """Return for each layer the share of uses outside its most used ``capacities`` experts.

        >>> RoutingProfile(((6, 3, 1, 0),)).missed([2])
        (Fraction(1, 10),)
        """
        return tuple(
            Fraction(sum(sorted(layer)[: len(layer) - capacity]), sum(layer))
            for layer, capacity in zip(self.counts, capacities, strict=True)
        )


def missed_by_chance(experts: int, capacities: Sequence[int]) -> tuple[Fraction, ...]:
    """Return the missed shares when all experts are used equally."""
    return tuple(Fraction(experts - capacity, experts) for capacity in capacities)


def adaptive_capacities(
    profile: RoutingProfile, layers: Sequence[ExpertLayer], budget_bytes: int
) -> tuple[int, ...]:
    """Return the experts of each layer after slots moved to the layers that miss more.

    All layers start with the same number of slots; the remainder goes to the first layers. Then
    one slot at a time moves from the layer that loses least to the layer that gains most (the
    first layer on a tie), while the gain is larger than the loss. A layer keeps at least its top
    k. Where slots differ in size, only moves within the budget are made.

    Source: mlx-moe lazy_experts/loading.py, compute_adaptive_allocations, with the top k as its
    ``min_per_layer``. It compares floats; this compares the same shares as exact integers.

    >>> rows = tuple(ExpertLayer(i, 4, 1, False, 10) for i in range(2))
    >>> adaptive_capacities(RoutingProfile(((9, 1, 0, 0), (4, 3, 2, 1))), rows, 40)
    (1, 3)
    """
    capacities, left = _equal_capacities(layers, budget_bytes)
    whole = lcm(*map(sum, profile.counts))
    uses = [
        [count * (whole // sum(counts)) for count in sorted(counts, reverse=True)]
        for counts in profile.counts
    ]

    def gain(index: int) -> int:
        full = capacities[index] == layers[index].experts
        return 0 if full else uses[index][capacities[index]]

    def loss(index: int) -> int:
        return uses[index][capacities[index] - 1]

    def best_move() -> tuple[int, int] | None:
        for recipient in sorted(range(len(layers)), key=gain, reverse=True):
            needed = layers[recipient].slot_bytes - left
            donors = [
                index
                for index, layer in enumerate(layers)
                if capacities[index] > layer.top_k and layer.slot_bytes >= needed
            ]
            donor = min(donors, key=loss, default=recipient)
            if gain(recipient) > max(loss(donor), whole // LEAST_GAIN):
                return donor, recipient
        return None

    while move := best_move():
        donor, recipient = move
        capacities[donor] -= 1
        capacities[recipient] += 1
        left += layers[donor].slot_bytes - layers[recipient].slot_bytes
    return tuple(capacities)


def _equal_capacities(layers: Sequence[ExpertLayer], budget_bytes: int) -> tuple[list[int], int]:
    """As many slots in every layer as the budget holds, and the bytes that are left."""
    each = budget_bytes // sum(layer.slot_bytes for layer in layers)
    capacities = [min(layer.experts, max(layer.top_k, each)) for layer in layers]
    left = budget_bytes - sum(
        n * layer.slot_bytes for n, layer in zip(capacities, layers, strict=True)
    )
    for index, layer in enumerate(layers):
        more = max(0, min(left // layer.slot_bytes, layer.experts - capacities[index]))
        capacities[index] += more
        left -= more * layer.slot_bytes
    return capacities, left


def read_profile(path: Path, layers: Sequence[ExpertLayer]) -> RoutingProfile:
    """Return the profile in a JSON file: ``{"0": {"17": 5, ...}, ...}``, layer, expert, count.

    mlx-moe writes the layers under ``layers``, with ``num_prompts`` next to it, and the counts of
    a layer under ``activation_counts``; both forms are read. An expert without a count is unused.

    Raises:
        InputError: when the file cannot be read, when a layer with experts is missing, or for an
            impossible layer, expert or count.
    """
    text = read_whole(path, limit=_MOST_BYTES)
    top = json_section(text, path, what="the expert profile", max_values=_MOST_VALUES)
    prompts = top.optional_count("num_prompts", most=MAX_FIGURE)
    named = top.mapping("layers") if "layers" in top else top
    known = {str(layer.index) for layer in layers}
    for name in named.values:
        if _INDEX.fullmatch(name) and name not in known:
            raise top.fail(None, f"layer {name} has no routed experts in this model")
    return RoutingProfile(tuple(_counts(named, layer) for layer in layers), prompts)


def _counts(named: Section, layer: ExpertLayer) -> tuple[int, ...]:
    index = str(layer.index)
    if index not in named:
        raise named.fail(None, f"layer {index} is missing; profile every layer")
    section = named.mapping(index)
    if "activation_counts" in section:
        section = section.mapping("activation_counts")
    counts = [0] * layer.experts
    for expert in section.values:
        if not _INDEX.fullmatch(expert) or int(expert) >= layer.experts:
            raise section.fail(expert, f"no such expert; the layer has {layer.experts}")
        counts[int(expert)] = section.count(expert, least=0, most=MAX_FIGURE)
    if not any(counts):
        raise section.fail(None, "no expert was used; profile with more tokens")
    return tuple(counts)
