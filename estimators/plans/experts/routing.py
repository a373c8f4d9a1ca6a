"""Routing profiles: how often each expert was used, and the share that slots cover."""

import hashlib
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.files import read_whole, short
from memfit.estimators.base.reading.section import MAX_FIGURE, Section, json_section
from memfit.estimators.weights.expert_slots import ExpertLayer

# 1000 layers of 1000 experts; a name and a count take about 20 bytes.
_MOST_VALUES = 2_000_000
_MOST_BYTES = 32 * 10**6
# mlx-moe stops moving slots for a gain of 1e-9 of a layer's uses or less.
LEAST_GAIN = 10**9
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


class RoutingProfile(Struct, frozen=True):
    """How often each expert was used."""

    counts: tuple[tuple[int, ...], ...]
    """One tuple per layer with experts: the tokens that used each, or the prompts."""
    prompts: int | None = None
    """Number of prompts, when the prompts that used an expert were counted."""
    prompt_counts: tuple[tuple[int, ...], ...] | None = None
    """The prompts that used each expert, when ``counts`` are tokens."""

    def universal(self) -> tuple[int, ...]:
        """Return for each layer how many experts at least half of the prompts use.

        Source: mlx-moe, upgrade_to_predictive_with_pinning, which pins them.

        >>> RoutingProfile(((9, 5, 4, 0),), prompts=10).universal()
        (2,)
        """
        return tuple(map(len, self.pinned()))

    def pinned(self) -> tuple[tuple[int, ...], ...]:
        """Return for each layer the experts of at least half of the prompts, most used first.

        One prompt does not say what others use.
        """
        least = self.prompts
        if least is None or least < 2:
            return tuple(() for _ in self.counts)
        by_prompts = self.prompt_counts or self.counts
        return tuple(
            tuple(
                expert
                for expert in _most_used(uses, prompts)
                if 2 * prompts[expert] >= least and prompts[expert]
            )
            for uses, prompts in zip(self.counts, by_prompts, strict=True)
        )

    @property
    def sha256(self) -> str:
        """The checksum of the counts."""
        return hashlib.sha256(repr((self.counts, self.prompt_counts)).encode()).hexdigest()

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


class ChosenSlots(Struct, frozen=True):
    """The experts that one layer keeps."""

    kept: tuple[int, ...]
    """In the order of their numbers, which is the order of their slots."""
    pinned: tuple[int, ...]
    """Those that never leave."""
    profiled: int
    """How many others the profile has seen."""


def chosen_slots(
    profile: RoutingProfile, capacity: int | Sequence[int], layers: Sequence[ExpertLayer]
) -> tuple[ChosenSlots, ...]:
    """Return the experts to keep: the universal ones, the most used, then any.

    ``capacity`` is of each layer, or one number for every layer.

    As many slots as a token needs are left to experts that can leave.

    >>> row = ExpertLayer(0, 4, 1, False, 10)
    >>> chosen_slots(RoutingProfile(((5, 0, 9, 7),), 2, ((1, 0, 2, 0),)), 2, [row])
    (ChosenSlots(kept=(2, 3), pinned=(2,), profiled=1),)
    """
    found = []
    each = [capacity] * len(layers) if isinstance(capacity, int) else capacity
    rows = zip(profile.counts, profile.pinned(), layers, each, strict=True)
    for uses, universal, layer, slots in rows:
        pinned = universal[: max(0, slots - layer.top_k)]
        others = [expert for expert in _most_used(uses, uses) if expert not in pinned]
        rest = others[: slots - len(pinned)]
        kept = tuple(sorted((*pinned, *rest)))
        found.append(ChosenSlots(kept, pinned, sum(uses[expert] > 0 for expert in rest)))
    return tuple(found)


def _most_used(uses: Sequence[int], prompts: Sequence[int]) -> list[int]:
    return sorted(range(len(uses)), key=lambda expert: (-prompts[expert], -uses[expert], expert))


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


def profile_text(
    profile: RoutingProfile, layers: Sequence[ExpertLayer], model_type: str, tokens: int
) -> str:
    """Return the file of a profile: mlx-moe's form, with counts of tokens in addition."""

    def named(counts: Sequence[int]) -> dict[str, int]:
        return {str(expert): count for expert, count in enumerate(counts) if count}

    by_prompts = profile.prompt_counts or profile.counts
    rows = {
        str(layer.index): {"activation_counts": named(prompts), "token_counts": named(uses)}
        for layer, uses, prompts in zip(layers, profile.counts, by_prompts, strict=True)
    }
    top = {
        "model_type": model_type,
        "num_experts": layers[0].experts,
        "num_prompts": profile.prompts,
        "num_tokens": tokens,
        "layers": rows,
    }
    return json.dumps(top, indent=1) + "\n"


def read_profile(
    path: Path, layers: Sequence[ExpertLayer], model_type: str | None = None
) -> RoutingProfile:
    """Return the profile in a JSON file: ``{"0": {"17": 5, ...}, ...}``, layer, expert, count.

    mlx-moe writes the layers under ``layers``, with ``num_prompts`` next to it, and the counts of
    a layer under ``activation_counts``; `profile_text` adds ``token_counts``. All these forms are
    read. An expert without a count is unused.

    Raises:
        InputError: when the file cannot be read, when it is of another model, when a layer with
            experts is missing, or for an impossible layer, expert or count.
    """
    text = read_whole(path, limit=_MOST_BYTES)
    top = json_section(text, path, what="the expert profile", max_values=_MOST_VALUES)
    return profile_in(top, layers, model_type)


def profile_in(
    top: Section, layers: Sequence[ExpertLayer], model_type: str | None
) -> RoutingProfile:
    """Return the profile of a file's content.

    Raises:
        InputError: as `read_profile`.
    """
    prompts = top.optional_count("num_prompts", most=MAX_FIGURE)
    named = top.mapping("layers") if "layers" in top else top
    _require_same_model(top, layers, model_type)
    known = {str(layer.index) for layer in layers}
    for name in named.values:
        if _INDEX.fullmatch(name) and name not in known:
            raise top.fail(None, f"layer {name} has no routed experts in this model")
    counts = tuple(_counts(named, layer, "activation_counts") for layer in layers)
    if not all("token_counts" in named.mapping(str(layer.index)) for layer in layers):
        return RoutingProfile(counts, prompts)
    tokens = tuple(_counts(named, layer, "token_counts") for layer in layers)
    return RoutingProfile(tokens, prompts, counts)


def _require_same_model(
    top: Section, layers: Sequence[ExpertLayer], model_type: str | None
) -> None:
    """Refuse a profile that says that it is of another model."""
    of = top.values.get("model_type")
    if model_type is not None and of is not None and of != model_type:
        raise top.fail(
            "model_type", f"the profile is of a {short(of)} model, this one is {model_type}"
        )
    experts = top.optional_count("num_experts", most=MAX_FIGURE)
    if experts is not None and experts != layers[0].experts:
        raise top.fail(
            "num_experts",
            f"the profile is of a model with {experts} experts, this one has {layers[0].experts}",
        )


def _counts(named: Section, layer: ExpertLayer, key: str) -> tuple[int, ...]:
    index = str(layer.index)
    if index not in named:
        raise named.fail(None, f"layer {index} is missing; profile every layer")
    section = named.mapping(index)
    if key in section:
        section = section.mapping(key)
    counts = [0] * layer.experts
    for expert in section.values:
        if not _INDEX.fullmatch(expert) or int(expert) >= layer.experts:
            raise section.fail(expert, f"no such expert; the layer has {layer.experts}")
        counts[int(expert)] = section.count(expert, least=0, most=MAX_FIGURE)
    if not any(counts):
        raise section.fail(None, "no expert was used; profile with more tokens")
    return tuple(counts)
