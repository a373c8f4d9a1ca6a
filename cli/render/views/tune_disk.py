"""Timed reads from the disk as a document."""

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.probes.experiments.disk import DiskRead, DiskTuneResult
from memfit.probes.speed import rate

_HEADINGS = ("Read", "Way", "Bytes", "Time", "Rate", "From disk", "Cold")


@view(DiskTuneResult)
def to_document(result: DiskTuneResult, units: Units) -> Document:
    """Return the document."""
    rows = tuple(_row(each, units) for each in result.reads)
    speed = result.bytes_per_second
    verdict = (
        f"The disk reads {format_bytes(speed, units, rounding='down')} a second; plans for this"
        " machine use it."
        if speed
        else "The rate of the disk is not known."
    )
    if result.crossover_experts:
        verdict += f" From {result.crossover_experts} experts on mx.load is faster than a mapping."
    facts = [f"largest tensor in a file of {format_bytes(result.file_bytes, units)}"]
    if result.expert_bytes:
        facts.append(f"an expert in it has {format_bytes(result.expert_bytes, units)}")
    return report(
        title=result.model,
        facts=facts,
        tables=(Table(_HEADINGS, rows, align="llr", keys=2),),
        verdict=verdict,
        colour="default" if speed else "yellow",
        sections=(("Notes", tuple(note.message for note in result.notes)),),
    )


def _row(each: DiskRead, units: Units) -> tuple[str, ...]:
    what = f"{each.experts} expert{'s' * (each.experts > 1)}" if each.experts else each.target
    per_second = rate(each.nbytes, each.ns)
    return (
        what,
        each.way,
        format_bytes(each.nbytes, units),
        f"{each.ns / 1e6:.2f} ms",
        f"{format_bytes(per_second, units, rounding='down')}/s" if per_second else "-",
        "-" if each.from_disk is None else format_bytes(each.from_disk, units),
        "yes" if each.is_cold else "no",
    )
