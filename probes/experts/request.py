"""The request of ``memfit tune experts``, and which capacities a model can have."""

from collections.abc import Iterable
from pathlib import Path

from memfit.estimators.base.errors import InputError, MemfitError
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.weights.expert_slots import ExpertLayer, require_capacity
from memfit.probes.experiments.base import RunRequest
from memfit.probes.experts.slots import Policy

PARTS = 4
"""Quarters of the experts are measured when no capacity is named."""


class ExpertsRequest(RunRequest, frozen=True, kw_only=True):
    """The prompts to count and measure, and the experts to keep."""

    path: Path
    """The directory of the checkpoint."""
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
    tries_wired: bool = False
    """Run the chosen capacity once more with the wired limit for its peak."""
    record_file: Path | None = None
    """Where what the routers chose in the measured runs is written."""


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
