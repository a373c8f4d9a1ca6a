"""``memfit tune disk``: how fast parts of a model are read from the disk."""

from typing import Annotated

from memfit.cli.measuring import measuring
from memfit.cli.options.groups import Only, PlanOutput, grouped
from memfit.cli.options.questions import NamedModel
from memfit.cli.options.run import RunOptions
from memfit.cli.render.output import require_writable


@grouped
def tune_disk(
    model: Annotated[NamedModel, Only("model", "model_option")],
    run: Annotated[RunOptions, Only("timeout", "download")],
    output: PlanOutput,
) -> None:
    """Read experts, a layer and a file of a model from the disk, in three ways.

    Plans for this machine use the rate, where it was measured on a large file.
    """
    from memfit.probes.experiments.disk import tune_disk as answer
    from memfit.probes.process import ModelProcess

    require_writable(output.file)
    with measuring(model.reference(), run, verbose=output.verbose) as (checkpoint, path, _):
        result = answer(checkpoint.id, start=run.start(ModelProcess, path))
    output.write(result, units=output.units)
