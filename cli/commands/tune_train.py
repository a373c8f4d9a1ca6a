"""``memfit tune train``: a few steps of mlx-lm's trainer, compared with the traced ones."""

from typing import Annotated

import typer

from memfit.cli.measuring import measuring
from memfit.cli.options.groups import Only, PlanOutput, grouped
from memfit.cli.options.questions import NamedModel, RuntimeOptions
from memfit.cli.options.run import RunOptions
from memfit.cli.options.training import TrainingOptions
from memfit.cli.render.output import require_writable

_RECIPE = Only(
    *("fine_tune_type", "num_layers", "batch_size", "max_seq_length", "grad_checkpoint"),
    *("grad_accumulation_steps", "optimizer", "rank", "scale", "dropout", "keys", "config"),
)


@grouped
def tune_train(
    model: Annotated[NamedModel, Only("model", "model_option")],
    training: Annotated[TrainingOptions, _RECIPE],
    run: Annotated[RunOptions, Only("force", "memory_limit", "timeout", "download")],
    runtime: Annotated[RuntimeOptions, Only("margin")],
    output: PlanOutput,
    updates: Annotated[
        int, typer.Option(min=1, max=1000, help="Updates to measure after the first.")
    ] = 2,
) -> None:
    """Train a few steps, and compare their memory with the plan.

    Every sequence of the batches has --max-seq-length tokens. No adapter is kept.
    """
    from memfit.probes.experiments.train import TrainRequest, tune_train
    from memfit.probes.process import ModelProcess
    from memfit.probes.store import user_store

    recipe, reference = training.recipe(), training.of_file(model).reference()
    require_writable(output.file, needs_stdout=False)
    settings = run.settings(runtime.margin, output.units)
    with measuring(reference, run, verbose=output.verbose) as (checkpoint, path, _):
        request = TrainRequest(checkpoint=checkpoint, recipe=recipe, updates=updates, **settings)
        result = tune_train(request, start=run.start(ModelProcess, path), store=user_store())
    output.write(result, units=output.units)
