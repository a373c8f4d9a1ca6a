"""``memfit fits``: which models fit a machine."""

from functools import partial
from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, TabularOutput, argument, grouped
from memfit.cli.options.questions import (
    CONTEXT,
    IMAGES,
    EstimatedModel,
    MachineOptions,
    VersionOptions,
    WorkloadOptions,
)
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import InputError


class LookedThrough(OptionGroup, frozen=True, kw_only=True):
    """Where models are looked for."""

    folders: list[str] | None = argument(
        metavar="[DIRECTORY...]", help="Folders with models.", show_default=False
    )


@grouped
def fits(
    looked_through: LookedThrough,
    model: Annotated[EstimatedModel, Only("adapter")],
    workload: Annotated[WorkloadOptions, Only(*CONTEXT, "prompt_tokens", "max_tokens", *IMAGES)],
    machine: MachineOptions,
    versions: VersionOptions,
    output: Annotated[TabularOutput, Only("format_", "json_", "file", "units")],
) -> None:
    """List the models that fit a machine.

    Each has the most weight bits that fit. These are the built-in samples, and all models in the
    directories, in Hugging Face's cache and in the stores of LM Studio and Ollama; with --adapter,
    those that it was trained on.
    """
    from memfit.estimators.checkpoint.local.local_models import local_models
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.fits import fits as answer

    device = machine.machine()
    if device is None:
        raise InputError("name a machine: --memory 32GB, or --device m4-max-64")
    catalog = Catalog(versioned=partial(versions.versioned, strict=False))
    folders = looked_through.folders or []
    with reporting(verbose=False) as progress:
        progress.begin("sizing models", sum(1 for _ in local_models(folders)))
        models = local_models(folders)
        result = answer(catalog, models, device, workload, progress, model.adapter)
    output.write(result, units=output.units, plot=output.draws(False))
    raise typer.Exit(Exit.YES if result.fitting else Exit.NO)
