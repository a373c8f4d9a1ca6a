"""``memfit plan ranks``: several machines for a model, or several models for a fleet."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.commands.plan.subject import sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import (
    CONTEXT,
    MachineOptions,
    NamedModel,
    VersionOptions,
    WorkloadOptions,
)
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import InputError
from memfit.estimators.questions.target import RuntimeQuestion


class FleetOptions(OptionGroup, frozen=True, kw_only=True):
    """A fleet in place of one model."""

    fleet: Path | None = option(
        metavar="FILE", help="Place the models of this file on its machines."
    )


@grouped
def ranks(
    model: NamedModel,
    options: FleetOptions,
    workload: Annotated[WorkloadOptions, Only(*CONTEXT, "prompt_tokens", "max_tokens", "kv_bits")],
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """Show what more machines allow, or place models on a fleet.

    Machines are ranks of mlx.launch, with tensor parallelism or as a pipeline.
    """
    from memfit.estimators.plans.ranks.plan import plan_named, plan_ranks
    from memfit.estimators.questions.target import MARGIN_BYTES

    if options.fleet is not None:
        _fleet(options.fleet, versions, output)
    devices = [device for device in machine.machines() if device]
    device = devices[0] if devices else machine.machine()
    if device is None:
        raise InputError("name a machine: --device m4-max-128, or --memory 128GB")
    sized = sized_for_mlx_lm(
        model, device, versions, verbose=output.verbose, margin_bytes=MARGIN_BYTES
    )
    run = workload.under(sized.runtime_model.runtime)
    result = plan_named(sized, devices, run) if devices else plan_ranks(sized, device, run)
    output.write(result, units=output.units)
    raise typer.Exit(Exit.YES if result.least_machines else Exit.NO)


def _fleet(path: Path, versions: RuntimeQuestion, output: PlanOutput) -> None:
    """Place a fleet, and exit."""
    from memfit.estimators.plans.ranks.fleet import plan_fleet, read_fleet
    from memfit.estimators.sizing.catalog import Catalog

    fleet = read_fleet(path)
    with reporting(verbose=output.verbose) as progress:
        catalog = Catalog(path.parent, progress, versions.versioned)
        result = plan_fleet(fleet, catalog)
    output.write(result, units=output.units)
    raise typer.Exit(Exit.YES if result.placed == len(result.placements) else Exit.NO)
