"""What ``memfit tune experts`` is asked to measure, and which capacities a model can have."""

from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.errors import InputError, MemfitError
from memfit.estimators.base.units import Units
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.weights.expert_slots import ExpertLayer, require_capacity
from memfit.probes.experts.slots import Policy

PARTS = 4
"""Quarters of the experts are measured when no capacity is named."""


class ExpertsRequest(Struct, frozen=True, kw_only=True):
    checkpoint: Checkpoint
    path: Path
    prompts: tuple[str, ...]
    """The profile counts their routing."""
    held_out: tuple[str, ...] = ()
    """Prompts that are measured; without them those of the profile."""
    capacities: tuple[int, ...] = ()
    policy: Policy = "load"
    max_tokens: int = 32
    prefill_step: int = 2048
    slowdown_percent: int = 20
    agreement_percent: int = 95
    profile_file: Path | None = None
    pack: Path | None = None
    memory_limit_bytes: int | None = None
    margin_bytes: int = 0
    force: bool = False
    units: Units = Units.GB


def check_described(request: ExpertsRequest) -> None:
    """Refuse what cannot be, before anything is loaded, where memfit knows the architecture.

    Raises:
        InputError: for a model without experts, or an impossible capacity.
    """
    catalog = Catalog()
    try:
        model = catalog.sized(catalog.add(request.checkpoint)).model
    except MemfitError:
        return  # the class itself says what it has, once it is loaded
    routed = list(model.experts().values())
    if not routed:
        raise InputError(
            f"{request.checkpoint.id}: no layer has routed experts; give a mixture of experts"
        )
    _check(request.capacities, routed[0].experts, routed[0].top_k)


def _check(capacities: Iterable[int], experts: int, top_k: int) -> None:
    for capacity in capacities:
        require_capacity(capacity, experts, top_k)


def capacities_of(request: ExpertsRequest, layer: ExpertLayer) -> tuple[int, ...]:
    """Return the numbers of experts to measure, in order.

    Raises:
        InputError: for a number that the model cannot have.
    """
    _check(request.capacities, layer.experts, layer.top_k)
    parts = range(1, PARTS + 1)
    spread = {max(layer.top_k, layer.experts * part // PARTS) for part in parts}
    return tuple(sorted(set(request.capacities or spread)))
