"""``memfit plan experts``: how many experts of each layer to keep in memory.

The rules are mlx-moe's, in integer bytes; docs/offload.md names their sources.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil

from msgspec import Struct

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.chips import chips
from memfit.estimators.machine.device import Device, OsRegime, stock_working_set
from memfit.estimators.machine.devices import runs
from memfit.estimators.plans.experts.routing import (
    RoutingProfile,
    adaptive_capacities,
    missed_by_chance,
)
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.experts import (
    CapacityRow,
    ExpertMisses,
    ExpertsPlan,
    LayerCapacities,
    RegimeCapacity,
    Worth,
)
from memfit.estimators.runtimes.expert_capacity import BUDGET, capacity_of_inventory
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import Need, Runtime, judge
from memfit.estimators.sizing.estimate import device_summary, limit_notes
from memfit.estimators.sizing.expert_rules import TEXTS, published, warnings_of, worth
from memfit.estimators.sizing.partial_experts import RunMemory, most_experts, running_bytes
from memfit.estimators.weights.expert_slots import (
    Inventory,
    layered_startup_bytes,
    require_capacity,
    startup_bytes,
)

_TABLE_PARTS = 8


class ExpertQuestion(Struct, frozen=True):
    """The run to plan for."""

    run: RunMemory
    capacities: tuple[int, ...] = ()
    """Capacities to show; an even spread when empty."""
    profile: RoutingProfile | None = None
    bytes_per_second: int | None = None
    """Read bandwidth of the disk."""


def plan_experts(
    experts: Inventory,
    question: ExpertQuestion,
    *,
    model: str,
    model_type: str,
    runtime: Runtime,
    device: Device | None,
) -> ExpertsPlan:
    """Return the plan; without a device it has rows, but no capacity.

    Raises:
        InputError: for a capacity that the model does not have.
    """
    found = capacity_of_inventory(experts, device.working_set_bytes) if device else None
    whole = most_experts(experts, question.run, device, starting=True)
    capacity = found if found is not None and found >= experts.top_k else None
    if whole == experts.experts:  # mlx-moe's 71 % are for what does not fit
        capacity = whole
    wanted = question.capacities or _spread(experts)
    rows = tuple(
        _row(experts, question, device, model_type, each)
        for each in sorted({*wanted, *([capacity] if capacity is not None else [])})
    )
    chosen = next((row for row in rows if row.capacity == capacity), None)
    return ExpertsPlan(
        model=model,
        model_type=model_type,
        runtime=runtime_summary(runtime),
        device=device_summary(device) if device else None,
        context_tokens=question.run.context_tokens,
        layers=len(experts.layers),
        experts=experts.experts,
        top_k=experts.top_k,
        slot_bytes=experts.slot_bytes,
        uniform_slots=len({layer.slot_bytes for layer in experts.layers}) == 1,
        all_expert_bytes=experts.expert_bytes,
        basis=experts.basis,
        regimes=tuple(_regimes(experts, device)) if device else (),
        capacity=capacity,
        fitting_capacity=whole,
        fitting_run_capacity=most_experts(experts, question.run, device, starting=False),
        wired_limit_bytes=_wired(chosen, device),
        rows=rows,
        adaptive=_adaptive(experts, question, chosen),
        worth=worth(experts, universal_share(question.profile), capacity),
        notes=(
            *limit_notes(question.run.max_context, question.run.context_tokens),
            *_notes(experts, rows, model_type, room=found, profile=question.profile),
        ),
    )


def _spread(experts: Inventory) -> tuple[int, ...]:
    """Eighths of the experts."""
    parts = min(_TABLE_PARTS, experts.experts)
    spread = {experts.experts * part // parts for part in range(1, parts + 1)}
    return tuple(each for each in spread if each >= experts.top_k)


def _row(
    experts: Inventory,
    question: ExpertQuestion,
    device: Device | None,
    model_type: str,
    capacity: int,
) -> CapacityRow:
    require_capacity(capacity, experts.experts, experts.top_k)
    run, capacities = question.run, [capacity] * len(experts.layers)
    held = experts.held_bytes(capacities)
    running = running_bytes(experts, run, capacities)
    startup = startup_bytes(experts, capacities)
    need = max(running, startup)
    pinned, found = _slots(question.profile, capacity)
    return CapacityRow(
        capacity=capacity,
        non_expert_bytes=experts.non_expert_bytes,
        expert_bytes=held,
        weight_bytes=experts.non_expert_bytes + held,
        lookup_bytes=experts.lookup_bytes,
        kv_bytes=run.kv_bytes,
        state_bytes=run.state_bytes,
        workspace_bytes=run.workspace_bytes,
        running_bytes=running,
        startup_bytes=startup,
        layered_startup_bytes=layered_startup_bytes(experts, capacities),
        page_cache_bytes=max(0, device.memory_bytes - running) if device else None,
        verdict=judge(Need(need, 0), device)[0],
        pinned_slots=pinned,
        found_slots=found,
        filler_slots=sum(capacities) - pinned - found,
        misses=misses(experts, question, capacities),
        warnings=tuple(warnings_of(experts, device, model_type, capacity, need)),
    )


def misses(experts: Inventory, question: ExpertQuestion, capacities: Sequence[int]) -> ExpertMisses:
    """Return the misses per token with the most used experts of the profile in the slots.

    Without a profile all experts are assumed to be used equally, which is the worst case.
    """
    if question.profile:
        shares = question.profile.missed(capacities)
    else:
        shares = missed_by_chance(experts.experts, capacities)
    missed = [layer.top_k * share for layer, share in zip(experts.layers, shares, strict=True)]
    count = sum(missed, Fraction())
    nbytes = ceil(
        sum(n * layer.slot_bytes for n, layer in zip(missed, experts.layers, strict=True))
    )
    speed = question.bytes_per_second
    return ExpertMisses(
        coverage_percent=round(float(100 - 100 * count / (experts.top_k * len(shares))), 2),
        misses_per_token=round(float(count), 3),
        disk_bytes_per_token=nbytes,
        disk_microseconds_per_token=ceil_div(nbytes * 10**6, speed) if speed else None,
        basis="derived" if question.profile else "bound",
    )


def _slots(profile: RoutingProfile | None, capacity: int) -> tuple[int, int]:
    """The slots that are pinned, and the others with an expert that the profile used."""
    if profile is None:
        return 0, 0
    pinned = [min(capacity, each) for each in profile.universal()]
    seen = [min(capacity, each) for each in profile.used()]
    return sum(pinned), sum(seen) - sum(pinned)


def _regimes(experts: Inventory, device: Device) -> Iterator[RegimeCapacity]:
    share, whole = BUDGET
    if device.stock_working_set_bytes is None:
        return
    chip = chips().get(device.name.rpartition("-")[0])
    for regime in OsRegime:
        if chip and not runs(chip, regime):
            continue
        stock = stock_working_set(device.memory_bytes, os_regime=regime)
        yield RegimeCapacity(
            os_regime=regime.value,
            working_set_bytes=stock.bytes,
            measured=stock.measured,
            budget_bytes=stock.bytes * share // whole,
            capacity=capacity_of_inventory(experts, stock.bytes),
        )


def _wired(row: CapacityRow | None, device: Device | None) -> int | None:
    """mlx-moe wires the memory in use after start-up, at most the working set."""
    if row is None or device is None or device.backend != "metal":
        return None
    return min(row.running_bytes, device.working_set_bytes)


def _adaptive(
    experts: Inventory, question: ExpertQuestion, chosen: CapacityRow | None
) -> LayerCapacities | None:
    if question.profile is None or chosen is None:
        return None
    capacities = adaptive_capacities(question.profile, experts.layers, chosen.expert_bytes)
    return LayerCapacities(
        capacities, experts.held_bytes(capacities), misses(experts, question, capacities)
    )


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


def _notes(
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
