"""Several ranks as a table."""

from collections.abc import Iterable, Iterator

from msgspec.structs import astuple

from memfit.cli.render.document import VERDICT_COLOURS, VERDICT_WORDS, Table, Text, Toned
from memfit.cli.render.views.estimate_text import alone_text
from memfit.cli.render.views.text import tenths
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.machine.device import name_as_sold
from memfit.estimators.results.estimate import RankFigures, RankPlan

_WORST_LAST = ("unknown", "fits", "tight", "exceeds", "does_not_load")


def rank_table(plan: RankPlan, units: Units) -> Iterator[Table | Text]:
    """Yield what every rank takes, and the split to give mlx-lm."""
    unit = "GB" if units is Units.GB else "GiB"
    headings = ["Rank", "Layers", "Weights", "Caches", "Load", "Prefill", "Decode", "Needs", ""]
    rows = [_row(rank, plan, units) for rank in plan.ranks]
    if any(rank.device for rank in plan.ranks):
        headings.append("Device")
        rows = [
            (*row, name_as_sold(rank.device or "-"))
            for row, rank in zip(rows, plan.ranks, strict=True)
        ]
    title = f"{len(plan.ranks)} ranks, {plan.parallel}, in {unit}"
    yield Table(headings, rows, title, align="rrrrrrrrll", droppable=(1, 6, 5))
    yield from _splits(plan, unit, units)
    yield Text(tuple(_hints(plan, units)), mark="-")


def _splits(plan: RankPlan, unit: str, units: Units) -> Iterator[Table]:
    """The split of the figures, and below it another one."""
    if not (plan.other and plan.split):
        return
    worst = max((rank.verdict for rank in plan.ranks), key=_WORST_LAST.index)
    splits = ((plan.split, plan.even, worst, plan.ranks), astuple(plan.other))
    rows = [
        (
            _joined(map(str, split)),
            _joined(tenths(rank.needed_bytes, units) for rank in ranks),
            Toned(VERDICT_WORDS[verdict], VERDICT_COLOURS[verdict]),
            "mlx_lm.server --pipeline" if even else f"Python only: pipeline(group, {list(split)})",
        )
        for split, even, verdict, ranks in splits
    ]
    title = f"layers of each rank, and what each needs in {unit}"
    yield Table(("Layers", "Needs", "", "Made by"), rows, title, align="llll")


def _joined(values: Iterable[str]) -> str:
    return " + ".join(values)


def _row(rank: RankFigures, plan: RankPlan, units: Units) -> tuple[str | Toned, ...]:
    first, last = rank.first_layer, rank.first_layer + rank.layers - 1
    layers = f"{first} to {last}" if plan.parallel == "pipeline" else f"1/{len(plan.ranks)} of all"
    return (
        str(rank.rank),
        layers,
        tenths(rank.resident_bytes, units),
        tenths(rank.kv_bytes + rank.state_bytes, units),
        *(
            "-" if nbytes is None else tenths(nbytes, units)
            for nbytes in (rank.load_bytes, rank.prefill_bytes, rank.decode_bytes)
        ),
        tenths(rank.needed_bytes, units),
        Toned(VERDICT_WORDS[rank.verdict], VERDICT_COLOURS[rank.verdict]),
    )


def _hints(plan: RankPlan, units: Units) -> Iterator[str]:
    if alone := alone_text(plan, units):
        yield alone
    if plan.split and not plan.even:
        yield (
            "mlx-lm's own programs split the layers evenly: give model.model.pipeline(group,"
            f" split={list(plan.split)}) yourself"
        )
    ring = max(rank.communication_bytes for rank in plan.ranks)
    if ring:
        yield f"needs includes {format_bytes(ring)} that MLX's ring keeps outside of its allocator"
