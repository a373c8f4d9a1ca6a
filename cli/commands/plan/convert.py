"""``memfit plan convert``: what one conversion by mlx_lm.convert takes."""

import typer

from memfit.cli.commands.plan.subject import sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import PlanOutput, grouped
from memfit.cli.options.questions import MachineOptions, NamedModel, VersionOptions


@grouped
def convert(
    model: NamedModel,
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """Show the memory and the disk that mlx_lm.convert takes.

    It writes one file of at most 5 GiB after another.
    """
    from memfit.estimators.plans.convert.plan import plan_convert

    sized = sized_for_mlx_lm(model, machine.machine(), versions, verbose=output.verbose)
    result = plan_convert(sized)
    output.write(result, units=output.units)
    raise typer.Exit(Exit.NO if result.conversion.verdict == "exceeds" else Exit.YES)
