"""A plan of static allocation as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Bar, BarChart, Document, Table, report
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.static import CallArena, Provision, StaticPlan

_PROVISIONS = ("Allocated", "Size", "Storage", "")
_SIZES = ("Arena", "Lower bound", "MLX", "Pool", "wasted", "Separate")
_CALLS = ("Call", "Tokens", "At", "Operations", "Buffers", *_SIZES)


@view(StaticPlan)
def to_document(result: StaticPlan, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds a chart of the arena by call."""
    return report(
        title=result.model,
        facts=tuple(_facts(result)),
        tables=(
            Table(_PROVISIONS, tuple(_provision(each, units) for each in result.provisions)),
            Table(
                *(_CALLS, tuple(_call(each, units) for each in result.calls), "The arena by call"),
                droppable=(3, 4, 9, 2),
            ),
        ),
        verdict=_verdict(result, units),
        colour="default",
        sections=(("Notes", tuple(note.message for note in result.notes)),),
        charts=(_plot(result, units),) if plot else (),
    )


def _facts(result: StaticPlan) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield f"{result.model_type}, the graph of {result.backend} as recorded with {versions}"
    yield (
        f"{result.context_tokens} tokens of context, capacity {result.capacity_tokens};"
        f" {len(result.placements)} buffers in the arena"
    )


def _provision(each: Provision, units: Units) -> tuple[str, ...]:
    name = each.name.replace("_", " ").replace("kv", "KV").replace("rope", "RoPE")
    size = format_bytes(each.nbytes, units)
    return name, size, each.mode, "" if each.lasting else "while loading"


def _call(call: CallArena, units: Units) -> tuple[str, ...]:
    counts = (call.tokens, call.position, call.operations, call.buffers)
    sizes = (
        *(call.arena_bytes, call.lower_bound_bytes, call.mlx_bytes),
        *(call.pool_bytes, call.pool_wasted_bytes, call.separate_bytes),
    )
    return (
        call.phase.replace("_", " "),
        *map(str, counts),
        *(format_bytes(size, units) for size in sizes),
    )


def _verdict(result: StaticPlan, units: Units) -> str:
    return (
        f"{format_bytes(result.private_bytes, units)} private and"
        f" {format_bytes(result.shared_bytes, units)} shared; the arena is"
        f" {format_bytes(result.arena_bytes, units)}, the lower bound"
        f" {format_bytes(result.lower_bound_bytes, units)}."
    )


def _plot(result: StaticPlan, units: Units) -> BarChart:
    bars = [
        Bar(
            call.phase.replace("_", " "),
            (call.lower_bound_bytes, call.arena_bytes - call.lower_bound_bytes),
        )
        for call in result.calls
    ]
    kinds = ("lower bound", "lost to placement")
    return BarChart(title="The arena by call", kinds=kinds, bars=bars, units=units)
