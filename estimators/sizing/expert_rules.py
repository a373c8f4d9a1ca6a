"""What mlx-moe published about running with a part of the experts, as rules for any model."""

from collections.abc import Iterator
from fractions import Fraction

from msgspec import Struct

from memfit.estimators.machine.device import GIB, Device
from memfit.estimators.results.experts import Worth
from memfit.estimators.weights.expert_slots import Inventory

# mlx-moe warns when the peak is above this share of the working set.
PRESSURE = (95, 100)
# mlx-moe README, "Which Models Benefit?".
LEAST_RATIO = 10
LEAST_COVERED = (3, 4)  # of the experts, in models without a shared expert
# The slots of one token and of the next: no expert is kept for longer.
NEAR_TOP_K = 2
MOST_UNIVERSAL = (1, 2)  # published: 15 % and 44 % work, 95 % and 100 % do not


class Published(Struct, frozen=True):
    """Measurements of one model; capacities are experts per layer."""

    model_type: str
    experts: int
    top_k: int
    least: int
    """Below this capacity the text is garbled."""
    memory_gib: int
    slow_from: int
    """From this capacity on, a Mac with ``memory_gib`` becomes slower."""
    residency: str


# mlx-moe README, "Known Limitations", and its measurements of Qwen3-Coder-Next-4bit on 32 GB.
PUBLISHED = (
    Published(
        "qwen3_next",
        512,
        10,
        least=192,
        memory_gib=32,
        slow_from=224,
        residency="at 208 experts 15.9 tokens per second, 19.3 with a wired limit, 23.4 with 256 MB"
        " of cached buffers in addition",
    ),
)


def worth(experts: Inventory, universal: Fraction | None, capacity: int | None) -> Worth:
    """Return whether it pays off: many experts per routed one, a shared one, concentrated use.

    ``universal`` is the share of the experts that at least half of the prompts use, None where
    nothing is known of the routing. Source: mlx-moe README, "Which Models Benefit?".
    """
    if capacity == experts.experts:
        return Worth(False, ("all experts fit: nothing has to be loaded on demand",))
    ratio, shared = Fraction(experts.experts, experts.top_k), experts.layers[0].shared
    enough = ratio >= LEAST_RATIO
    reasons = [
        f"{experts.experts} experts, {experts.top_k} per token, {float(ratio):.1f} to 1:"
        f" {'enough' if enough else 'too few'}, {LEAST_RATIO} to 1 is the smallest that worked",
        "a shared expert covers for experts that are missing"
        if shared
        else "no shared expert covers for experts that are missing: three quarters are needed",
    ]
    if universal is None:
        reasons.append("a profile with num_prompts shows how concentrated the routing is")
    else:
        reasons.append(
            f"{float(100 * universal):.0f} % of the experts are used by at least half of the"
            f" prompts: {'concentrated' if universal <= Fraction(*MOST_UNIVERSAL) else 'too even'}"
        )
    if not enough or not shared:
        return Worth(False, tuple(reasons))
    concentrated = None if universal is None else universal <= Fraction(*MOST_UNIVERSAL)
    return Worth(concentrated, tuple(reasons))


def published(experts: Inventory, model_type: str) -> Published | None:
    """Return what was published of a model with these experts, None where nothing was."""
    key = (model_type, experts.experts, experts.top_k)
    return next((p for p in PUBLISHED if (p.model_type, p.experts, p.top_k) == key), None)


def warnings_of(
    experts: Inventory, device: Device | None, model_type: str, capacity: int, need_bytes: int
) -> Iterator[str]:
    """Yield the codes of the warnings for a capacity; `TEXTS` has their texts."""
    known = published(experts, model_type)
    covered, whole = LEAST_COVERED
    if capacity <= NEAR_TOP_K * experts.top_k and capacity < experts.experts:
        yield "near-top-k"
    if known and capacity < known.least:
        yield "quality"
    if not experts.layers[0].shared and capacity * whole < experts.experts * covered:
        yield "no-shared-expert"
    if device is None:
        return
    share, whole = PRESSURE
    is_slow = (
        known and device.memory_bytes == known.memory_gib * GIB and capacity >= known.slow_from
    )
    if is_slow:
        yield "published-pressure"
    if need_bytes * whole > device.working_set_bytes * share:
        yield "pressure"


TEXTS = {
    "near-top-k": "a token takes {top_k} experts of each layer: with no more than twice as many,"
    " nearly every token reads others from the disk, or goes without",
    "quality": "published: below {known.least} experts per layer this model writes garbled text",
    "no-shared-expert": "published: models without a shared expert write garbled text below three"
    " quarters of their experts",
    "published-pressure": "published: on {known.memory_gib} GB this model becomes slower from"
    " {known.slow_from} experts per layer on",
    "pressure": "above 95 % of the working set macOS evicts GPU memory, which is slow",
}
"""What each warning says; ``known`` is of `published`."""
