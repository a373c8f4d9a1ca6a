"""How many experts of each layer to keep resident when not all fit, by mlx-moe's rule."""

# Source: mlx-moe, select_capacity: 71 % of the recommended working set, and multiples of 8 from
# 16 up. memfit computes in whole bytes; the original divides decimal units by 1024.
from typing import TYPE_CHECKING

from memfit.estimators.arch.model import Part
from memfit.estimators.runtimes.facets import ExpertCapacity, MlxLmPrograms, loaded_weights

if TYPE_CHECKING:
    from memfit.estimators.runtimes.interface import RuntimeModel
    from memfit.estimators.weights.expert_slots import Inventory

BUDGET = (71, 100)
MULTIPLE = 8
LEAST_MULTIPLE = 16


def expert_capacity(
    *, working_set_bytes: int, other_bytes: int, expert_bytes: int, experts: int
) -> ExpertCapacity:
    """Return the capacity for layers with ``experts`` each, ``expert_bytes`` in total.

    ``other_bytes`` are the weights that always stay resident.

    Qwen3-Next-80B-A3B 4-bit on 32 GB, macOS 26:

    >>> expert_capacity(working_set_bytes=26_800_603_136, other_bytes=1_357_516_288,
    ...                 expert_bytes=43_486_543_872, experts=512).experts
    208
    """
    share, whole = BUDGET
    room = max(0, working_set_bytes * share // whole - other_bytes)
    capacity = min(experts, room * experts // expert_bytes)
    if capacity < experts:
        capacity = whole_slots(capacity)
    return ExpertCapacity(capacity, experts, capacity * expert_bytes // experts)


def capacity_of(runtime_model: "RuntimeModel") -> ExpertCapacity | None:
    """Return the experts to keep of each layer on the model's device.

    Under mlx-moe they are those that it keeps. None without a device, under another runtime than
    these and mlx-lm, and for a model without experts or with different numbers of them.
    """
    if kept := loaded_weights(runtime_model).experts:
        return kept
    subject = runtime_model.subject
    device, footprint = subject.device, subject.footprint
    if device is None or not runtime_model.facet(MlxLmPrograms):
        return None
    counts = {moe.experts for moe in subject.model.experts().values()}
    expert_bytes = footprint.by_part[Part.EXPERTS.value]
    if len(counts) != 1 or not expert_bytes or footprint.basis == "bound":
        return None
    return expert_capacity(
        working_set_bytes=device.working_set_bytes,
        other_bytes=footprint.loaded_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        experts=counts.pop(),
    )


def capacity_of_inventory(experts: "Inventory", working_set_bytes: int) -> int:
    """Return the experts of each layer for a working set, of experts that are stored one by one."""
    return expert_capacity(
        working_set_bytes=working_set_bytes,
        other_bytes=experts.non_expert_bytes,
        expert_bytes=experts.expert_bytes,
        experts=experts.experts,
    ).experts


def whole_slots(capacity: int) -> int:
    """Return the capacity rounded down to a multiple of 8; below 16 it is kept.

    >>> whole_slots(15), whole_slots(215)
    (15, 208)
    """
    return capacity - capacity % MULTIPLE if capacity >= LEAST_MULTIPLE else capacity
