"""``memfit fits``: which models fit a machine."""

from functools import partial
from typing import Annotated, ClassVar, Literal

import typer

from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, TabularOutput, argument, grouped, option
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
from memfit.estimators.base.units import parse_count

ROWS, BRIEF_ROWS = 20, 6


class Models(OptionGroup, frozen=True, kw_only=True):
    """Where models are looked for, and which of them are listed."""

    panel: ClassVar[str] = "Listed models"

    folders: list[str] | None = argument(
        metavar="[DIRECTORY...]", help="Folders with models.", show_default=False
    )
    sort: Literal["size", "context", "speed"] = option(
        "--sort", help="Order of those that fit.", default="size"
    )
    use: Literal["chat", "agents", "images"] | None = option(
        "--for",
        help="Only models with room for it: chat 8k tokens, agents 32k; images: that take some.",
        default=None,
    )
    min_context: int | None = option(
        "--min-context",
        metavar="TOKENS",
        read=parse_count,
        help="Only models with room for a prompt of this length.",
        default=None,
    )
    brief: bool = option(
        "--brief", help="One screen, and what to type next.", default=False, hidden=True
    )
    every: bool = option(
        "--all", help="All that fit, and the models of the index too.", default=False
    )


@grouped
def fits(
    choice: Models,
    model: Annotated[EstimatedModel, Only("adapter")],
    workload: Annotated[WorkloadOptions, Only(*CONTEXT, "prompt_tokens", "max_tokens", *IMAGES)],
    machine: MachineOptions,
    versions: VersionOptions,
    output: Annotated[TabularOutput, Only("format_", "json_", "file", "units")],
) -> None:
    """List the models that fit a machine.

    Each has the most weight bits, at least 4, that leave room for the longest prompt. These are all
    models in the directories, in Hugging Face's cache and in the stores of LM Studio and Ollama,
    and of the built-in samples the 20 largest that fit; with --adapter, those that it was trained
    on.
    """
    from memfit.estimators.checkpoint.local.local_models import local_models, published_models
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.fits import NEXT_ROWS, Selection
    from memfit.estimators.sizing.fits import fits as answer

    device = machine.machine()
    if device is None:
        raise InputError("name a machine: --memory 32GB, or --device m4-max-64")
    catalog = Catalog(versioned=partial(versions.versioned, strict=False))
    folders = choice.folders or []
    selection = Selection(
        rows=None if choice.every else BRIEF_ROWS if choice.brief else ROWS,
        next_rows=0 if choice.brief else NEXT_ROWS,
        sort=choice.sort,
        use=choice.use,
        least_context=choice.min_context or 0,
    )
    with reporting(verbose=False) as progress:
        models = [*local_models(folders), *(published_models() if choice.every else ())]
        progress.begin("sizing models", len(models))
        result = answer(catalog, models, device, workload, progress, model.adapter, selection)
    output.write(result, units=output.units, plot=output.draws(False), brief=choice.brief)
    raise typer.Exit(Exit.YES if result.fitting else Exit.NO)
