"""Which experts a model's tokens went to, and what a number of slots would have caught of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.strict_json import parse_object
from memfit.estimators.base.records import record
from memfit.estimators.plans.experts.expert_slots import ExpertLayer

# A thousand layers of as many experts; their names and counts are about twenty bytes each.
_MOST_VALUES = 2_000_000
_MOST_BYTES = 32 * 10**6
_MOST_COUNT = 2**63
_SCALE = 10**18
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


@record(frozen=True, slots=True)
class RoutingProfile:
    """How often each expert was used: one tuple a layer, in the order of the plan's layers.

    ``prompts`` is given where a count is of prompts in which the expert was active.
    """

    counts: tuple[tuple[int, ...], ...]
    prompts: int | None = None

    def universal(self) -> tuple[int, ...]:
        """Return for each layer how many experts half of the prompts or more activate.

        Source: mlx-moe upgrade_to_predictive_with_pinning, which pins them.

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
    """Return the shares when all experts are used alike: no better than this is known."""
    return tuple(Fraction(experts - capacity, experts) for capacity in capacities)


def adaptive_capacities(
    profile: RoutingProfile, layers: Sequence[ExpertLayer], budget_bytes: int
) -> tuple[int, ...]:
    """Return the experts of each layer that miss least within a number of bytes.

    Every layer has at least its top k, then the next most used expert of any layer follows: with
    slots of one size nothing misses less.

    >>> rows = tuple(ExpertLayer(i, 4, 1, False, 10) for i in range(2))
    >>> adaptive_capacities(RoutingProfile(((9, 1, 0, 0), (4, 3, 2, 1))), rows, 40)
    (1, 3)
    """
    capacities = [layer.top_k for layer in layers]
    left = budget_bytes - sum(layer.top_k * layer.slot_bytes for layer in layers)
    for place in sorted(_gains(profile, layers), reverse=True):
        index = -place[1]
        if layers[index].slot_bytes <= left:
            capacities[index] += 1
            left -= layers[index].slot_bytes
    return tuple(capacities)


def _gains(
    profile: RoutingProfile, layers: Sequence[ExpertLayer]
) -> Iterator[tuple[int, int, int]]:
    """What each expert beyond the top k catches for its bytes; a layer's own in their order."""
    for index, (counts, layer) in enumerate(zip(profile.counts, layers, strict=True)):
        for rank, count in enumerate(sorted(counts, reverse=True)):
            if rank >= layer.top_k:
                gain = count * layer.top_k * _SCALE // (sum(counts) * layer.slot_bytes)
                yield gain, -index, -rank


def lcp_priority(frequency: int, age: int) -> float:
    """Return the priority by which mlx-moe keeps an expert: the least is given up.

    ``age`` is the number of steps since it was used last. Source: mlx-moe, ExpertCache.

    >>> lcp_priority(8, 0), lcp_priority(8, 128)
    (8.0, 2.0)
    """
    return frequency * float(0.25 ** (age / 128))


def read_profile(path: Path, layers: Sequence[ExpertLayer]) -> RoutingProfile:
    """Return the profile in a JSON file: ``{"0": {"17": 5, ...}, ...}``, layer, expert, count.

    The layers may stand under ``layers``, with ``num_prompts`` beside them, and the counts under
    ``activation_counts``, as mlx-moe writes them. An expert that is not named was not used.

    Raises:
        InputError: when the file cannot be read, a layer with experts is not in it, or a layer,
            an expert or a count cannot be.
    """
    text = read_whole(path, limit=_MOST_BYTES)
    data = parse_object(
        text, path, what="the expert profile", error=InputError, max_values=_MOST_VALUES
    )
    prompts = data.get("num_prompts")
    where = f"{printable(path)}: "
    if prompts is not None and (type(prompts) is not int or not 0 < prompts < _MOST_COUNT):
        raise InputError(
            f"{where}num_prompts: expected a count of prompts, got {printable(prompts)}"
        )
    named = data.get("layers", data)
    if not isinstance(named, dict):
        raise InputError(f"{where}layers: expected layers by their number")
    known = {str(layer.index) for layer in layers}
    for name in named:
        if _INDEX.fullmatch(name) and name not in known:
            raise InputError(f"{where}layer {name} has no routed experts in this model")
    return RoutingProfile(tuple(_counts(named, layer, where) for layer in layers), prompts)


def _counts(named: Mapping[str, Any], layer: ExpertLayer, where: str) -> tuple[int, ...]:
    where = f"{where}layer {layer.index}"
    entry = named.get(str(layer.index))
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected the counts of its experts; profile every layer")
    entry = entry.get("activation_counts", entry)
    counts = [0] * layer.experts
    for expert, count in entry.items() if isinstance(entry, dict) else ():
        if not _INDEX.fullmatch(expert) or int(expert) >= layer.experts:
            raise InputError(f"{where}: has {layer.experts} experts, none is {printable(expert)!r}")
        if type(count) is not int or not 0 <= count < _MOST_COUNT:
            raise InputError(f"{where}: expert {expert}: expected a count, got {printable(count)}")
        counts[int(expert)] = count
    if not any(counts):
        raise InputError(f"{where}: no expert was used; profile with more tokens")
    return tuple(counts)
