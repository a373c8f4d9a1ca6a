"""Replayed traffic as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Bar, BarChart, Document, Table, report
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.replay import Replay

MOST_REFUSED = 10


@view(Replay)
def to_document(result: Replay, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds the timeline."""
    settings = result.settings
    refused = result.refused[:MOST_REFUSED]
    rest = len(result.refused) - len(refused)
    rows = [
        (
            str(each.request),
            str(each.prompt_tokens),
            str(each.max_tokens),
            _advice(each.largest_prompt_tokens),
            each.reason,
        )
        for each in refused
    ]
    is_safe = not (result.over or result.refused_though_fits)
    return report(
        title=f"{result.model}: {result.traffic}",
        facts=(
            f"limit {format_limit(result.limit_bytes, units)}, weights"
            f" {format_bytes(result.weights_bytes, units)}; prefill step {settings.prefill_step},"
            f" {settings.prompt_concurrency} prompts and {settings.rows} requests together",
        ),
        tables=(
            Table(("Of the requests", "count", "share"), tuple(_counts(result)), align="lrr"),
            *(
                (
                    Table(
                        ("Refused", "prompt", "reply", "would fit", "why"),
                        tuple(rows),
                        align="rrrrl",
                    ),
                )
                if rows
                else ()
            ),
        ),
        verdict=(
            f"{'Safe' if is_safe else 'Not safe'}: {result.over} moments over the limit,"
            f" {result.refused_though_fits} requests refused that fit alone; peak"
            f" {format_bytes(result.peak_bytes, units)} in {result.calls} calls."
        ),
        colour="green" if is_safe else "red",
        sections=(("Notes", (*([f"{rest} more were refused"] if rest else []), *result.notes)),),
        charts=(_timeline(result, units),) if plot else (),
    )


def _counts(result: Replay) -> Iterator[tuple[str, str, str]]:
    for name, count in {
        "requests": result.requests,
        "refused": len(result.refused),
        "waited": result.waited,
        "  of them in vain": result.waited_in_vain,
        "began with a stored cache": result.cached,
        "stored caches evicted": result.evicted,
        "caches not stored": result.not_stored,
    }.items():
        yield name, str(count), f"{100 * count / result.requests:.0f} %"


def _advice(largest: int) -> str:
    return str(largest) if largest else "none"


def _timeline(result: Replay, units: Units) -> BarChart:
    """Running, stored and waiting bytes over the calls, with the limit as a line."""
    bars = [
        Bar(
            f"call {each.call}",
            (each.running_bytes, each.stored_bytes, each.waiting_bytes),
            result.limit_bytes,
            f"{each.running} run, {each.waiting} wait, {each.stored} stored",
        )
        for each in result.timeline
    ]
    return BarChart(
        title="Memory over the calls, each the largest of its span",
        kinds=("running", "stored", "waiting"),
        bars=bars,
        units=units,
        limit=f"limit {format_limit(result.limit_bytes, units)}",
    )
