"""``memfit plan train``: the memory of mlx_lm.lora, and what lowers it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memfit.cli.commands.plan.subject import sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import PlanOutput, grouped
from memfit.cli.options.questions import MachineOptions, NamedModel, VersionOptions
from memfit.cli.options.training import TrainingOptions

if TYPE_CHECKING:
    from memfit.estimators.base.workload import Recipe
    from memfit.estimators.plans.train.question import TrainingData
    from memfit.estimators.sizing.sized_model import SizedModel


@grouped
def train(
    model: NamedModel,
    training: TrainingOptions,
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """Show the memory of mlx_lm.lora, and which settings fit.

    The step of mlx-lm's own trainer is traced: it needs MLX and mlx-lm, and no weights.
    """
    from memfit.estimators.plans.train.plan import plan_train, with_measured
    from memfit.estimators.plans.train.question import TrainQuestion
    from memfit.estimators.questions.target import MARGIN_BYTES
    from memfit.probes.saved import saved_phases
    from memfit.probes.store import user_store

    recipe, model, directory = training.recipe(), training.of_file(model), training.data_directory()
    sized = sized_for_mlx_lm(
        model, machine.machine(), versions, verbose=output.verbose, margin_bytes=MARGIN_BYTES
    )
    data = None if directory is None else _data(directory, model.reference(), sized, recipe)
    question = TrainQuestion(
        recipe=recipe, quantize=model.quantization(), data=data, config=training.adapter_file()
    )
    result = plan_train(sized, question)
    saved = saved_phases(result, sized.checkpoint, sized.device, user_store())
    result = with_measured(result, saved, sized.device)
    output.write(result, units=output.units, plot=output.draws(False))
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" else Exit.YES)


def _data(directory: Path, reference: str, sized: "SizedModel", recipe: "Recipe") -> "TrainingData":
    from memfit.probes.training_data import read_training_data

    return read_training_data(
        directory,
        _directory(reference, sized),
        sized.checkpoint.config,
        mask_prompt=recipe.mask_prompt,
    )


def _directory(reference: str, sized: "SizedModel") -> Path | None:
    """Return the directory of the model's tokenizer, None where it is not on this machine."""
    from memfit.estimators.base.errors import MemfitError
    from memfit.estimators.base.progress import NULL_PROGRESS
    from memfit.probes.download import local_model

    path = Path(os.path.expanduser(reference))
    if sized.checkpoint.source != "hub":
        return path if os.path.isdir(path) else path.parent
    try:
        return local_model(reference, before_download=None, progress=NULL_PROGRESS)[1]
    except MemfitError:
        return None
