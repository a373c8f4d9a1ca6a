"""What is known about running with a part of the experts, compared with a plan."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from memfit.estimators.plans.experts.routing import RoutingProfile
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.experts import CapacityRow, ExpertsPlan, Worth
from memfit.estimators.sizing.expert_rules import TEXTS, published
from memfit.estimators.weights.expert_slots import Inventory


def measured_worth(plan: ExpertsPlan) -> Worth:
    """Return whether it pays off by what was measured here, which outranks what was published.

    Where the whole model does not fit, a part that ran pays, as for memfit tune experts. Where it
    fits, its speed decides, which is not stored.
    """
    fastest = max(
        (each for each in plan.measured if each.decode_tokens_per_second),
        key=lambda each: each.decode_tokens_per_second or 0,
        default=None,
    )
    if fastest is None or fastest.capacity == plan.experts:
        return plan.worth
    fits_whole = plan.fitting_capacity == plan.experts
    text = (
        f"measured here: {fastest.capacity} of {plan.experts} experts decode"
        f" {fastest.decode_tokens_per_second:.1f} tokens/s"
    )
    text += "; memfit tune experts compares it with all" if fits_whole else ", and all do not fit"
    published = (f"published or computed: {reason}" for reason in plan.worth.reasons)
    return Worth(None if fits_whole else True, (text, *published))


def universal_share(profile: RoutingProfile | None) -> Fraction | None:
    """Return the share of the experts that at least half of a profile's prompts use."""
    if profile is None or profile.prompts is None:
        return None
    return Fraction(sum(profile.universal()), sum(map(len, profile.counts)))


def notes(
    experts: Inventory,
    rows: Sequence[CapacityRow],
    model_type: str,
    *,
    room: int | None,
    profile: RoutingProfile | None,
) -> Iterator[Note]:
    """Yield the notes of a plan; ``room`` is the largest capacity that the device holds."""
    known = published(experts, model_type)
    codes = {code for row in rows for code in row.warnings}
    for code, text in TEXTS.items():
        if code in codes:
            yield Note("warning", code, text.format(known=known, top_k=experts.top_k))
    if room is not None and room < experts.top_k:
        text = f"there is room for {room} experts per layer, and a token needs {experts.top_k}"
        yield Note("warning", "too-few", text)
    if known:
        yield Note("info", "residency", f"published: {known.residency}")
    if profile and profile.prompts and profile.prompt_counts is None:
        text = (
            "the profile counts prompts, not tokens: misses of an expert that is used in few"
            " prompts, but for many of their tokens, are underestimated"
        )
        yield Note("info", "counts-prompts", text)
    if profile is None:
        text = (
            "no profile: all experts are assumed to be used equally, so coverage is a lower bound"
            " and bytes from disk are an upper bound"
        )
        yield Note("info", "no-profile", text)
    yield Note(
        "info",
        "misses",
        "bytes from disk count one read per miss; mlx-moe skips the expert instead and replaces"
        " slots between tokens",
    )
    yield Note(
        "info",
        "startup",
        "start-up, mlx-moe: reads one 5 GiB file at a time with mx.load, with all experts in it;"
        " by layer: reads one tensor at a time, as memfit tune experts does; a reader that maps the"
        " files needs no more memory than the run",
    )
    yield Note(
        "info",
        "page-cache",
        "repeated misses are read from the page cache: slots that take all free memory leave no"
        " page cache, so a smaller capacity can be faster",
    )
