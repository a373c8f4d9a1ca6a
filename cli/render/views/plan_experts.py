"""A plan of experts as a document."""

from collections.abc import Iterator

from memfit.cli.render.chart import working_set
from memfit.cli.render.document import (
    VERDICT_CELLS,
    VERDICT_COLOURS,
    VERDICT_WORDS,
    Bar,
    BarChart,
    Document,
    Table,
    report,
)
from memfit.cli.render.view import view
from memfit.cli.render.views.text import machine_memory, runtime_text
from memfit.cli.render.views.tune_text import rate
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.experts import CapacityRow, ExpertMisses, ExpertsPlan

_MEMORY = (
    *("Experts", "Weights", "Lookup", "KV", "State", "Workspace"),
    *("Running", "Start-up", "By layer", "Verdict"),
)
_MISSES = ("Experts", "Coverage", "Misses", "From disk", "Time", "Pinned", "Found", "Filler")


@view(ExpertsPlan)
def to_document(result: ExpertsPlan, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds a chart of memory and coverage."""
    return report(
        title=result.model,
        facts=tuple(_facts(result, units)),
        tables=(
            Table(_MEMORY, tuple(_memory(row, units) for row in result.rows), droppable=(2, 4)),
            Table(_MISSES, tuple(_missed(row, units) for row in result.rows), "Per token"),
            *_replayed(result, units),
        ),
        verdict=_verdict(result, units),
        colour=VERDICT_COLOURS[result.verdict],
        sections=(
            ("To set", tuple(_settings(result, units))),
            ("Measured here", tuple(_measured(result, units))),
            ("Does it pay off", (_worth(result), *result.worth.reasons)),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        charts=(_plot(result, units),) if plot else (),
    )


def _facts(result: ExpertsPlan, units: Units) -> Iterator[str]:
    slots = "a slot takes" if result.uniform_slots else "the largest slot takes"
    yield (
        f"{result.model_type}, {result.experts} experts in each of {result.layers} layers,"
        f" {result.top_k} per token; {slots} {result.slot_bytes} bytes, all experts"
        f" {format_bytes(result.all_expert_bytes, units)} ({result.basis});"
        f" {runtime_text(result.runtime)}"
    )
    if result.device:
        yield (
            f"{machine_memory(result.device, units)},"
            f" working set {format_limit(result.device.working_set_bytes, units)};"
            f" {result.context_tokens} tokens of context"
        )
    else:
        yield "no device: --device m4-max-64 or --memory 32GB gives a capacity"


def _memory(row: CapacityRow, units: Units) -> tuple[str, ...]:
    parts = (
        row.weight_bytes,
        row.lookup_bytes,
        row.kv_bytes,
        row.state_bytes,
        row.workspace_bytes,
        row.running_bytes,
        row.startup_bytes,
        row.layered_startup_bytes,
    )
    return (
        str(row.capacity),
        *(format_bytes(part, units) for part in parts),
        VERDICT_CELLS[row.verdict],
    )


def _missed(row: CapacityRow, units: Units) -> tuple[str, ...]:
    slots = (row.pinned_slots, row.found_slots, row.filler_slots)
    return str(row.capacity), *_misses(row.misses, units), *map(str, slots)


def _misses(misses: ExpertMisses, units: Units) -> tuple[str, ...]:
    return (
        f"{misses.coverage_percent:.2f} %",
        f"{misses.misses_per_token:.1f}",
        format_bytes(misses.disk_bytes_per_token, units),
        _milliseconds(misses.disk_microseconds_per_token),
    )


def _replayed(result: ExpertsPlan, units: Units) -> Iterator[Table]:
    """The recorded routing at the capacities of the other tables."""
    shown = {row.capacity for row in result.rows}
    rows = tuple(
        (
            str(each.capacity),
            each.policy,
            f"{each.misses_per_token:.2f}",
            f"{each.reads_per_token:.2f}",
            format_bytes(each.read_bytes_per_token, units),
            _milliseconds(each.disk_microseconds_per_token),
            "-" if each.tokens_per_second is None else f"{each.tokens_per_second:.1f}",
        )
        for each in result.replayed
        if each.capacity in shown
    )
    headings = ("Experts", "Policy", "Misses", "Reads", "From disk", "Time", "Tokens/s")
    if rows:
        yield Table(headings, rows, "Recorded routing, replayed, per token", align="rlr", keys=2)


def _milliseconds(microseconds: int | None) -> str:
    return "-" if microseconds is None else f"{microseconds / 1000:.1f} ms"


def _verdict(result: ExpertsPlan, units: Units) -> str:
    row = result.chosen
    if result.device is None:
        return "No device: it is not known what fits."
    if row is None:
        return "Does not fit: there is no room for the experts of one token."
    is_whole = row.capacity == result.experts
    kept = f"{row.capacity} of {result.experts} experts in each layer"
    text = (
        f"{f'All {row.capacity} experts fit' if is_whole else f'Keep {kept}'}:"
        f" {format_bytes(row.running_bytes, units)} during the run,"
        f" {format_bytes(row.startup_bytes, units)} during start-up; {VERDICT_WORDS[row.verdict]}"
    )
    # What is measured here outranks what was published of the model.
    if any(each.capacity == row.capacity for each in result.measured):
        return f"{text}, measured here."
    caveats = "; ".join(result.caveats)
    return f"{text}; but {caveats}." if caveats else f"{text}."


def _settings(result: ExpertsPlan, units: Units) -> Iterator[str]:
    for regime in result.regimes:
        yield (
            f"{regime.os_regime}: {regime.capacity} of {result.experts} experts, from 71 % of"
            f" {format_limit(regime.working_set_bytes, units)}"
        )
    if result.device:
        fitting = _experts(result.fitting_capacity)
        running = _experts(result.fitting_run_capacity)
        yield f"in 90 % of the working set: {fitting} fit with the start-up, {running} without it"
    if result.least_capacities:
        least = (f"{policy} {found or 'none'}" for policy, found in result.least_capacities.items())
        speed = result.wanted_tokens_per_second
        yield f"for {speed} tokens/s at least these experts by policy: {', '.join(least)}"
    if result.wired_limit_bytes is not None:
        yield f"wired limit: {format_bytes(result.wired_limit_bytes, units)}, all memory in use"
    if result.adaptive:
        capacities = result.adaptive.capacities
        coverage, misses, disk, time = _misses(result.adaptive.misses, units)
        yield (
            f"by layer: {min(capacities)} to {max(capacities)} experts in"
            f" {format_bytes(result.adaptive.expert_bytes, units)} cover {coverage}; {misses}"
            f" misses and {disk} per token" + (f", {time}" if time != "-" else "")
        )


def _measured(result: ExpertsPlan, units: Units) -> Iterator[str]:
    for each in result.measured:
        speed = each.decode_tokens_per_second
        yield (
            f"{each.capacity} experts, {each.policy}: start-up"
            f" {format_bytes(each.startup_bytes, units)}, peak"
            f" {format_bytes(each.peak_bytes, units)} with {each.prompt_tokens} prompt tokens,"
            f" {'-' if speed is None else rate(speed)} tokens/s,"
            f" {each.misses_per_token:.1f} misses per token ({each.measurement_id})"
        )


def _experts(capacity: int | None) -> str:
    return "none" if capacity is None else f"{capacity} experts"


def _worth(result: ExpertsPlan) -> str:
    pays = result.worth.pays
    return "not known" if pays is None else "yes" if pays else "no"


def _plot(result: ExpertsPlan, units: Units) -> BarChart:
    budget = result.device.working_set_bytes if result.device else None
    bars = [
        Bar(
            str(row.capacity),
            (row.non_expert_bytes, row.expert_bytes, row.running_bytes - row.weight_bytes),
            budget,
            f"{row.misses.coverage_percent:.1f} %",
        )
        for row in result.rows
    ]
    return BarChart(
        title="Memory and coverage by experts",
        kinds=("other weights", "experts", "the rest"),
        bars=bars,
        units=units,
        limit=working_set(budget, units),
    )
