"""``memfit plan together``: the models that fit a machine at once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.exits import exit_of_verdict
from memfit.cli.options.completion import complete_model
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import (
    CONTEXT,
    MachineOptions,
    VersionOptions,
    WorkloadOptions,
)
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_count
from memfit.estimators.machine.device import Device

if TYPE_CHECKING:
    from memfit.estimators.plans.together.plan import Served
    from memfit.estimators.sizing.catalog import Catalog


class TogetherOptions(OptionGroup, frozen=True, kw_only=True):
    """The replies, and what else is written."""

    max_tokens: int = option(
        help="Tokens that each request generates.", default=512, read=parse_count, min=1
    )
    matrix: Path | None = option(
        metavar="FILE", help="Write the sets as a routing section of llama-swap, YAML."
    )


@grouped
def together(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="The models.", autocompletion=complete_model),
    ],
    options: TogetherOptions,
    workload: Annotated[WorkloadOptions, Only(*CONTEXT)],
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """Show which models fit a machine at once, and what to unload.

    Each runs in a server of its own, with one request at a time: memfit plan together
    qwen3-8b-4bit gemma-3-4b --memory 32GB --context 8k
    """
    from memfit.cli.render.output import emit, require_writable
    from memfit.estimators.plans.together.plan import plan_together
    from memfit.estimators.sizing.catalog import Catalog

    device = machine.machine()
    if device is None:
        raise InputError("name the machine: --device m4-max-64, or --memory 64GB")
    require_writable(options.matrix)
    with reporting(verbose=output.verbose) as progress:
        catalog = Catalog(progress=progress, versioned=versions.versioned)
        served = [_served(catalog, name, device, workload, options.max_tokens) for name in models]
    result = plan_together(served, device)
    if options.matrix is not None:
        emit(result.matrix, options.matrix)
    output.write(result, units=output.units)
    raise typer.Exit(exit_of_verdict(result.verdict))


def _served(
    catalog: "Catalog", name: str, device: Device, workload: WorkloadOptions, max_tokens: int
) -> "Served":
    from msgspec.structs import replace

    from memfit.estimators.plans.together.plan import Served
    from memfit.estimators.questions.target import MARGIN_BYTES
    from memfit.estimators.sizing.sized_model import require_loaded

    sized = require_loaded(catalog.sized(name, device=device, margin_bytes=MARGIN_BYTES))
    run = workload.under(sized.runtime_model.runtime)
    return Served(sized, replace(run, max_tokens=max_tokens))
