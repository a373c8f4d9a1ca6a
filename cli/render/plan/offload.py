"""A plan of cached conversations in words."""

from collections.abc import Iterator

from memfit.cli.render.plan.bars import Bar, bar_lines
from memfit.cli.render.plan.sheet import Grid, Plot, Sheet
from memfit.estimators.base.units import Units, format_bytes, format_duration
from memfit.estimators.results.offload import OffloadPlan, Restore, Simulation, SizeRow

_SIZES = ("Tokens", "16-bit", "8-bit", "4-bit", "Blocks", "Stored", "In memory", "Next chunk")


def to_sheet(result: OffloadPlan, units: Units, *, plot: bool) -> Sheet:
    """Return the plan as a sheet."""
    grids = [Grid(_SIZES, tuple(_size(row, units) for row in result.sizes), "One conversation")]
    if result.simulation:
        grids.append(_simulated(result.simulation, units))
    return Sheet(
        title=result.model,
        facts=tuple(_facts(result, units)),
        grids=tuple(grids),
        verdict=_verdict(result),
        colour=_colour(result),
        sections=(
            ("Memory", tuple(_memory(result, units))),
            ("Disk", tuple(_disk(result, units))),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        plots=(_plot(result, units),) if plot else (),
    )


def _facts(result: OffloadPlan, units: Units) -> Iterator[str]:
    text = (
        f"{result.model_type}, {result.layers} layers with keys and values; stored at"
        f" {result.bits} bits"
    )
    yield text + ("" if result.bits == 16 else f" in groups of {result.group_size}")
    if result.device:
        yield (
            f"{result.device.name}, working set"
            f" {format_bytes(result.device.working_set_bytes, units)}; the model and the active"
            f" conversation take {format_bytes(result.active_bytes, units)} at most"
        )
    else:
        yield "no device named: --device m4-max-64 or --memory 32GB gives a budget"


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


def _simulated(run: Simulation, units: Units) -> Grid:
    rows = [
        ("Requests, agents", f"{run.requests}, {run.agents}"),
        ("Found in memory", str(run.hot)),
        ("Found on disk", str(run.warm)),
        ("Given up before", str(run.cold)),
        ("New", str(run.new)),
        ("Read", f"{format_bytes(run.read_bytes, units)}{_in(run.read_ms)}"),
        ("Written", f"{format_bytes(run.written_bytes, units)}{_in(run.write_ms)}"),
        ("Prefilled", f"{run.prefill_tokens} tokens{_in(run.prefill_ms)}"),
        ("Not prefilled again", f"{run.saved_tokens} tokens"),
        (
            "Without a cache",
            f"{run.prefill_tokens + run.saved_tokens} tokens{_in(run.uncached_prefill_ms)}",
        ),
        ("Most in memory", format_bytes(run.largest_hot_bytes, units)),
        ("Most on disk", format_bytes(run.largest_disk_bytes, units)),
    ]
    return Grid(("Requests", "Simulated"), tuple(rows), "The trace of requests")


def _in(milliseconds: int | None) -> str:
    return "" if milliseconds is None else f", {format_duration(milliseconds)}"


def _verdict(result: OffloadPlan) -> str:
    hot, asked = result.hot_conversations, result.conversations
    if hot is None:
        return "No device named: nothing is said of what fits."
    text = f"{hot} of {asked} conversations of {result.tokens} tokens stay in memory"
    return f"{text}; the others are read from disk." if hot < asked else f"{text}."


def _colour(result: OffloadPlan) -> str:
    hot = result.hot_conversations
    if hot is None:
        return "default"
    return "green" if hot == result.conversations else "yellow" if hot else "red"


def _memory(result: OffloadPlan, units: Units) -> Iterator[str]:
    if result.pool:
        yield (
            f"budget: {format_bytes(result.pool.budget_bytes, units)}, {result.pool.blocks} blocks"
            f" of 256 tokens of a layer, {result.pool.block_bytes} bytes each"
        )
    threshold = result.threshold
    if threshold.tokens is not None:
        yield (
            f"hot threshold: {threshold.tokens} tokens, up to which all {result.conversations} stay"
            f" in memory; the fixed {threshold.fixed_tokens} take"
            f" {format_bytes(threshold.fixed_stored_bytes, units)} each, and"
            f" {format_bytes(threshold.fixed_plain_bytes, units)} in 16 bits"
        )
    yield from _restore(result.restore, units)


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
            f" {format_bytes(total, units)} with weights and what else is in memory"
        )
        yield text if fits is None else f"{text}: {'fits' if fits else 'does not fit'}"


def _disk(result: OffloadPlan, units: Units) -> Iterator[str]:
    disk, times = result.disk, result.times
    text = (
        f"all {result.conversations}: {format_bytes(disk.stored_bytes, units)}, with the reserve"
        f" {format_bytes(disk.with_reserve_bytes, units)} free"
    )
    yield text if disk.conversations is None else f"{text}; the disk takes {disk.conversations}"
    spans = (("save", times.save_ms), ("load", times.load_ms), ("prefill", times.prefill_ms))
    known = [f"{name} {format_duration(span)}" for name, span in spans if span is not None]
    if known:
        faster = "" if times.times_faster is None else f": {times.times_faster} times as fast"
        yield f"one conversation: {', '.join(known)}{faster}"


def _plot(result: OffloadPlan, units: Units) -> Plot:
    many = result.conversations
    most = max(2 * result.tokens, result.sizes[0].tokens)  # beyond it the bars dwarf all else
    bars = [
        Bar(
            str(row.tokens),
            (
                many * row.four_bit_bytes,
                many * (row.eight_bit_bytes - row.four_bit_bytes),
                many * (row.plain_bytes - row.eight_bit_bytes),
            ),
        )
        for row in result.sizes
        if row.tokens <= most
    ]
    limit = ("budget", result.pool.budget_bytes) if result.pool else None
    kinds = ("4 bits", "up to 8", "up to 16")

    def draw(width: int, ascii_only: bool) -> Iterator[str]:
        title = f"{many} conversations against tokens"
        return bar_lines(title, kinds, bars, limit, units, width, ascii_only=ascii_only)

    return draw
