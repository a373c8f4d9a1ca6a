"""What was published of running with a part of the experts, held against a plan."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.working_set import GIB
from memfit.estimators.plans.experts.expert_slots import Inventory
from memfit.estimators.plans.experts.routing import RoutingProfile
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.experts import CapacityRow, Worth

# mlx-moe warns when the peak is above this share of the working set.
PRESSURE = (95, 100)
# mlx-moe README, "Which Models Benefit?".
LEAST_RATIO = 10
LEAST_COVERED = (3, 4)  # of the experts, where no shared expert stands in for those that miss
MOST_UNIVERSAL = (1, 2)  # published: 15 % and 44 % work, 95 % and 100 % do not


@record(frozen=True, slots=True)
class Published:
    """What was published of one model: below ``least`` its text is garbled."""

    model_type: str
    experts: int
    top_k: int
    least: int
    memory_gib: int
    slow_from: int  # on a Mac of that memory
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
        residency="at 208 experts 15.9 tokens a second, 19.3 with a wired limit, 23.4 with 256 MB"
        " of buffers cached besides",
    ),
)


def worth(experts: Inventory, profile: RoutingProfile | None, capacity: int | None) -> Worth:
    """Return whether it pays: many experts for a token's few, a shared one, few used by all.

    Source: mlx-moe README, "Which Models Benefit?".
    """
    if capacity == experts.experts:
        return Worth(False, ("all experts fit: there is nothing to load on demand",))
    ratio, shared = Fraction(experts.experts, experts.top_k), experts.layers[0].shared
    enough = ratio >= LEAST_RATIO
    reasons = [
        f"{experts.experts} experts for {experts.top_k} of a token, {float(ratio):.1f} to 1:"
        f" {'enough' if enough else 'too few'}, {LEAST_RATIO} to 1 is the least that worked",
        "a shared expert stands in for those that miss"
        if shared
        else "no shared expert stands in for those that miss: three quarters of them are needed",
    ]
    universal = _universal(profile)
    if universal is None:
        reasons.append("how concentrated the routing is needs a profile with num_prompts")
    else:
        reasons.append(
            f"{float(100 * universal):.0f} % of the experts are used by half of the prompts or"
            f" more: {'concentrated' if universal <= Fraction(*MOST_UNIVERSAL) else 'too even'}"
        )
    if not enough or not shared:
        return Worth(False, tuple(reasons))
    concentrated = None if universal is None else universal <= Fraction(*MOST_UNIVERSAL)
    return Worth(concentrated, tuple(reasons))


def _universal(profile: RoutingProfile | None) -> Fraction | None:
    if profile is None or profile.prompts is None:
        return None
    return Fraction(sum(profile.universal()), sum(map(len, profile.counts)))


def _published(experts: Inventory, model_type: str) -> Published | None:
    key = (model_type, experts.experts, experts.top_k)
    return next((p for p in PUBLISHED if (p.model_type, p.experts, p.top_k) == key), None)


def warnings_of(
    experts: Inventory, device: Device | None, model_type: str, capacity: int, need_bytes: int
) -> Iterator[str]:
    """Yield the codes of what is to be warned of at a capacity; `notes` explains each."""
    known = _published(experts, model_type)
    covered, whole = LEAST_COVERED
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


_NOTES = {
    "quality": "published: below {known.least} experts of a layer this model's text is garbled",
    "no-shared-expert": "published: without a shared expert, models are garbled below three"
    " quarters of their experts",
    "published-pressure": "published: on {known.memory_gib} GB this model becomes slower from"
    " {known.slow_from} experts of a layer on",
    "pressure": "above 95 % of the working set the GPU's memory is evicted, and it slows down",
}


def notes(
    experts: Inventory,
    rows: Sequence[CapacityRow],
    model_type: str,
    *,
    room: int | None,
    profile: RoutingProfile | None,
) -> Iterator[Note]:
    """Yield what the reader must know; ``room`` is the capacity there is room for."""
    known = _published(experts, model_type)
    codes = {code for row in rows for code in row.warnings}
    for code, text in _NOTES.items():
        if code in codes:
            yield Note("warning", code, text.format(known=known))
    if room is not None and room < experts.top_k:
        text = f"there is room for {room} experts of a layer, and a token needs {experts.top_k}"
        yield Note("warning", "too-few", text)
    if known:
        yield Note("info", "residency", f"published: {known.residency}")
    if profile and profile.prompts:
        text = (
            "the profile counts prompts, not tokens: an expert that is active in few prompts for"
            " many tokens misses more than is shown"
        )
        yield Note("info", "counts-prompts", text)
    if profile is None:
        text = (
            "no profile: every expert is taken to be used alike, so coverage is the least and the"
            " bytes from disk are the most"
        )
        yield Note("info", "no-profile", text)
    yield Note(
        "info",
        "misses",
        "bytes from disk are of every miss read once; mlx-moe leaves the expert out instead and"
        " exchanges slots between tokens",
    )
    yield Note(
        "info",
        "startup",
        "the start-up reads one 5 GiB file at a time through mx.load, its experts whole; a reader"
        " that maps the files needs no more than the run",
    )
    yield Note(
        "info",
        "page-cache",
        "misses that were read before come from the page cache: slots that take all free memory"
        " leave none, and a smaller capacity can be faster",
    )
