"""Where the models of a fleet run, as a document."""

from collections import Counter

from memfit.cli.render.document import VERDICT_COLOURS, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import runtime_text, size, tenths
from memfit.estimators.base.units import Units
from memfit.estimators.results.ranks import FleetPlan


@view(FleetPlan)
def to_document(result: FleetPlan, units: Units) -> Document:
    """Return where each model runs, equal placements together, and what is left."""
    rows = tuple(
        (
            placement.model,
            ", ".join(placement.machines) or "nowhere",
            placement.parallel or "-",
            "-" if placement.needed_bytes is None else tenths(placement.needed_bytes, units),
        )
        for placement in result.placements
    )
    left = tuple(
        (
            each.device,
            str(each.machines),
            tenths(each.free_bytes, units, down=True),
            size(each.working_set_bytes, units, down=True),
        )
        for each in result.left
    )
    whole = len(result.placements)
    placed = f"{result.placed} of {whole} models are placed"
    unplaced = Counter(p.reason for p in result.placements if p.reason)
    return report(
        title="Fleet",
        facts=("; ".join((placed, *map(runtime_text, result.runtimes))),),
        tables=(
            Table(
                ("Model", "Machines", "Shared", f"Needs, {units.symbol}"),
                rows,
                align="lllr",
                wrapped=(0, 1),
            ),
            Table(("Left on", "Machines", f"Free, {units.symbol}", "Of"), left, align="lrrr"),
        ),
        verdict=f"{result.placed} of {whole} models have a place.",
        colour=VERDICT_COLOURS["fits" if result.placed == whole else "exceeds"],
        sections=(
            ("No place", tuple(f"{count} x: {reason}" for reason, count in unplaced.items())),
        ),
    )
