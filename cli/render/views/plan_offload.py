"""A plan of cached conversations as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Bar, BarChart, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import budget_of, runtime_text
from memfit.estimators.base.units import Units, format_bytes, format_duration, format_limit
from memfit.estimators.results.offload import (
    MeasuredStorage,
    OffloadPlan,
    PolicyRun,
    Restore,
    Simulation,
    SizeRow,
    Speeds,
)

_SIZES = ("Tokens", "16-bit", "8-bit", "4-bit", "Blocks", "Stored", "In memory", "Next chunk")


_POLICIES = ("Eviction", "Memory", "Disk", "Neither", "Read", "Written", "Most held", "Waiting")


@view(OffloadPlan)
def to_document(result: OffloadPlan, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds a chart of all conversations by length."""
    tables = [Table(_SIZES, tuple(_size(row, units) for row in result.sizes), "One conversation")]
    if result.simulation:
        rows = simulation_rows(result.simulation, units)
        tables.append(Table(("Requests", "Simulated"), rows, "Request trace"))
        tables.append(Table(_POLICIES, tuple(_policy(run, units) for run in result.policies)))
    return report(
        title=result.model,
        facts=tuple(_facts(result, units)),
        tables=tuple(tables),
        verdict=_verdict(result),
        colour=_colour(result),
        sections=(
            ("Memory", tuple(_memory(result, units))),
            ("Disk", tuple(_disk(result, units))),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        charts=(_plot(result, units),) if plot else (),
    )


def _facts(result: OffloadPlan, units: Units) -> Iterator[str]:
    text = (
        f"{result.model_type}, {result.layers} layers with keys and values; stored at"
        f" {result.bits} bits"
    )
    text += "" if result.bits == 16 else f" in groups of {result.group_size}"
    yield f"{text}; {runtime_text(result.runtime)}"
    if result.device:
        yield (
            f"{budget_of(result.device, units)}; the model and the active conversation"
            f" take {format_bytes(result.active_bytes, units)} at most"
        )
    else:
        yield "no device: --device m4-max-64 or --memory 32GB gives a budget"


def _size(row: SizeRow, units: Units) -> tuple[str, ...]:
    exact = (row.plain_bytes, row.eight_bit_bytes, row.four_bit_bytes)
    return (
        str(row.tokens),
        *(format_bytes(nbytes, units) for nbytes in exact),
        str(row.blocks),
        format_bytes(row.stored_bytes, units),
        "-" if row.in_budget is None else str(row.in_budget),
        str(row.next_chunk_tokens),
    )


def simulation_rows(run: Simulation, units: Units) -> tuple[tuple[str, str], ...]:
    """Return the name and the value of each figure of a replayed request trace."""
    return (
        ("Requests, agents", f"{run.requests}, {run.agents}"),
        ("Found in memory", str(run.hot)),
        ("Found on disk", str(run.warm)),
        ("Evicted before", str(run.cold)),
        ("New", str(run.new)),
        ("Read", f"{format_bytes(run.read_bytes, units)}{_in(run.read_ms)}"),
        ("Written", f"{format_bytes(run.written_bytes, units)}{_in(run.write_ms)}"),
        ("Prefilled", f"{run.prefill_tokens} tokens{_in(run.prefill_ms)}"),
        ("Reused", f"{run.saved_tokens} tokens"),
        (
            "Without a cache",
            f"{run.prefill_tokens + run.saved_tokens} tokens{_in(run.uncached_prefill_ms)}",
        ),
        ("Most in memory", format_bytes(run.largest_hot_bytes, units)),
        ("Most on disk", format_bytes(run.largest_disk_bytes, units)),
    )


def _policy(run: PolicyRun, units: Units) -> tuple[str, ...]:
    """One policy."""
    found, most, waiting = run.simulation, run.threshold_tokens, run.simulation.waiting_ms
    name = run.policy if most is None else f"{run.policy}, {most} tokens"
    return (
        name,
        str(found.hot),
        str(found.warm),
        str(found.cold + found.new),
        format_bytes(found.read_bytes, units),
        format_bytes(found.written_bytes, units),
        format_bytes(found.largest_hot_bytes, units),
        "-" if waiting is None else format_duration(waiting),
    )


def _in(milliseconds: int | None) -> str:
    return "" if milliseconds is None else f", {format_duration(milliseconds)}"


def _verdict(result: OffloadPlan) -> str:
    hot, all_of_them = result.hot_conversations, result.conversations
    if hot is None:
        return "No device: it is not known what fits."
    text = f"{hot} of {all_of_them} conversations of {result.tokens} tokens stay in memory"
    return f"{text}; the others are read from disk." if hot < all_of_them else f"{text}."


def _colour(result: OffloadPlan) -> str:
    hot = result.hot_conversations
    if hot is None:
        return "default"
    return "green" if hot == result.conversations else "yellow" if hot else "red"


def _memory(result: OffloadPlan, units: Units) -> Iterator[str]:
    if result.pool:
        yield (
            f"budget: {format_limit(result.pool.budget_bytes, units)},"
            f" {result.pool.blocks} blocks"
            f" of 256 tokens of one layer, {result.pool.block_bytes} bytes each"
        )
    threshold = result.threshold
    if threshold.tokens is not None:
        yield (
            f"hot threshold: {threshold.tokens} tokens, up to which all {result.conversations} stay"
            f" in memory; agent-memory's fixed {threshold.fixed_tokens} tokens take"
            f" {format_bytes(threshold.fixed_stored_bytes, units)} each, and"
            f" {format_bytes(threshold.fixed_plain_bytes, units)} at 16 bits"
        )
    yield from _restore(result.restore, units)
    if result.device is None and result.restore.basis != "measured" and result.bits != 16:
        bulk, streaming = (
            format_bytes(nbytes, units)
            for nbytes in (result.restore.cpu_bulk_bytes, result.restore.cpu_streaming_bytes)
        )
        yield f"with MLX on a CPU: {streaming} layer by layer, {bulk} in bulk"
    if result.restore.basis == "measured" and result.measured:
        yield f"both restores as measured by memfit tune cache ({result.measured.measurement_id})"


def _restore(restore: Restore, units: Units) -> Iterator[str]:
    for name, own, total, fits in (
        (
            "layer by layer",
            restore.streaming_bytes,
            restore.streaming_total_bytes,
            restore.streaming_fits,
        ),
        ("in bulk", restore.bulk_bytes, restore.bulk_total_bytes, restore.bulk_fits),
    ):
        text = (
            f"restore {name}: {format_bytes(own, units)},"
            f" {format_bytes(total, units)} with weights and other conversations in memory"
        )
        yield text if fits is None else f"{text}: {'fits' if fits else 'does not fit'}"


def _disk(result: OffloadPlan, units: Units) -> Iterator[str]:
    disk, times = result.disk, result.times
    text = (
        f"all {result.conversations}: {format_bytes(disk.stored_bytes, units)}, with the reserve"
        f" {format_bytes(disk.with_reserve_bytes, units)} free"
    )
    yield text if disk.conversations is None else f"{text}; the disk holds {disk.conversations}"
    spans = (("save", times.save_ms), ("load", times.load_ms), ("prefill", times.prefill_ms))
    known = [f"{name} {format_duration(span)}" for name, span in spans if span is not None]
    if known:
        faster = "" if times.times_faster is None else f": {times.times_faster} times as fast"
        yield f"one conversation: {', '.join(known)}{faster}"
    if result.measured:
        yield from _speeds(result.measured, result.speeds, units)


def _speeds(found: MeasuredStorage, used: Speeds, units: Units) -> Iterator[str]:
    """The speeds that were measured, where they are the ones in use."""
    measured = Speeds().or_measured(found)
    rates = (("read", used.read, measured.read), ("write", used.write, measured.write))
    known = [
        f"{name} {format_bytes(rate, units)}/s"
        for name, rate, own in rates
        if rate is not None and rate == own
    ]
    if used.prefill == measured.prefill:
        known.append(f"prefill {used.prefill} tokens/s")
    if known:
        where = "" if found.from_disk else "; the file may have been read from memory"
        yield (
            f"{', '.join(known)} as measured by memfit tune cache with {found.tokens} tokens in"
            f" {found.bits} bits ({found.measurement_id}){where}"
        )


def _plot(result: OffloadPlan, units: Units) -> BarChart:
    many = result.conversations
    most = max(2 * result.tokens, result.sizes[0].tokens)  # longer bars would hide the others
    budget = result.pool.budget_bytes if result.pool else None
    bars = [
        Bar(
            str(row.tokens),
            (
                many * row.four_bit_bytes,
                many * (row.eight_bit_bytes - row.four_bit_bytes),
                many * (row.plain_bytes - row.eight_bit_bytes),
            ),
            budget,
        )
        for row in result.sizes
        if row.tokens <= most
    ]
    return BarChart(
        title=f"{many} conversations by tokens",
        kinds=("4 bits", "up to 8", "up to 16"),
        bars=bars,
        units=units,
        limit="" if budget is None else f"budget {format_limit(budget, units)}",
    )
