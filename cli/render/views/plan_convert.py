"""A plan of a conversion as a document."""

from memfit.cli.render.document import VERDICT_COLOURS, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import conversion_text, size
from memfit.estimators.base.units import Units
from memfit.estimators.machine.device import name_as_sold
from memfit.estimators.results.convert import ConvertPlan

_WORDS = {"fits": "fits", "tight": "fits tightly", "exceeds": "does not fit"}


@view(ConvertPlan)
def to_document(result: ConvertPlan, units: Units) -> Document:
    """Return the document."""
    found = result.conversion
    least, most = (size(each, units) for each in (found.least_peak_bytes, found.peak_bytes))
    read = "Read from disk" if found.is_local else "Downloaded"
    rows = (
        ("Memory", most if least == most else f"{least} to {most}", "by the order of evaluation"),
        ("Largest file", size(found.largest_shard_bytes, units), f"of {found.shards}, in memory"),
        (read, size(found.source_bytes, units), "it stays beside what is written"),
        ("Written", size(found.output_bytes, units), result.format),
    )
    return report(
        title=f"{result.model} to {result.format}: what converting takes",
        facts=(f"mlx_lm.convert {result.mlx_lm_version}",),
        tables=(Table(("", "Bytes", ""), rows, align="lrl"),),
        verdict=_verdict(result, units),
        colour=VERDICT_COLOURS[found.verdict],
        sections=(("Notes", tuple(note.message for note in result.notes)),),
        commands=result.commands,
    )


def _verdict(result: ConvertPlan, units: Units) -> str:
    found, device = result.conversion, result.device
    text = f"Converting {conversion_text(found, units)}."
    if not device:
        return text
    budget = size(device.working_set_bytes, units, down=True)
    return f"{text} On {name_as_sold(device.name)} that {_WORDS[found.verdict]}, of {budget}."
