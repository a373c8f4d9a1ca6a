"""How many experts of each layer to keep resident when not all fit, by mlx-moe's rule."""

# Source: mlx-moe, select_capacity: 71 % of the recommended working set, and multiples of 8 from
# 16 up. memfit computes in whole bytes; the original divides decimal units by 1024.
from msgspec import Struct

BUDGET = (71, 100)
MULTIPLE = 8
LEAST_MULTIPLE = 16


class ExpertCapacity(Struct, frozen=True):
    """Experts of each layer that fit in the budget, 71 % of the working set."""

    experts: int
    of: int
    """How many experts a layer has."""
    resident_bytes: int
    """What the experts that fit take, all layers together."""


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


def whole_slots(capacity: int) -> int:
    """Return the capacity rounded down to a multiple of 8; below 16 it is kept.

    >>> whole_slots(15), whole_slots(215)
    (15, 208)
    """
    return capacity - capacity % MULTIPLE if capacity >= LEAST_MULTIPLE else capacity
