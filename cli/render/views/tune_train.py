"""Measured training steps as a document."""

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.machine.device import name_as_sold
from memfit.probes.experiments.train import TrainTuneResult


@view(TrainTuneResult)
def to_document(result: TrainTuneResult, units: Units) -> Document:
    recipe, versions = result.recipe, result.versions
    rows = tuple(
        (
            each.phase.replace("_", " ").capitalize(),
            format_bytes(each.estimated_bytes, units),
            format_bytes(each.measured_bytes, units),
            f"{each.ratio:.3f}",
        )
        for each in result.phases
    )
    largest = result.largest
    return report(
        title=result.model,
        facts=(
            f"{recipe.fine_tune_type}, --num-layers {recipe.num_layers}, batch {recipe.batch_size},"
            f" {result.sequence_tokens} tokens, {result.steps} steps",
            f"{name_as_sold(result.device.name)}, mlx {versions['mlx']},"
            f" mlx-lm {versions['mlx_lm']}",
            *([f"saved as {result.measurement_id}"] if result.measurement_id else ()),
        ),
        tables=(Table(("Peak of", "Estimated", "Measured", "Ratio"), rows),),
        verdict=f"The run took {format_bytes(largest.measured_bytes, units)} at most; the estimate"
        f" is {'within' if largest.is_near else 'not within'} 5 % of it.",
        colour="green" if largest.is_near else "yellow",
        sections=(("Notes", tuple(note.message for note in result.notes)),),
    )
