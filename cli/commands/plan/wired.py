"""``memfit plan wired``: simulate a scenario of tickets, and find the limit to set for it."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, PlanOutput, grouped
from memfit.cli.options.questions import VersionOptions


@grouped
def wired(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A YAML file of policies and tickets.")
    ],
    versions: VersionOptions,
    output: Annotated[PlanOutput, Only("format_", "json_", "file", "units")],
    plot: Annotated[bool, typer.Option("--plot", help="Draw limit and demand over time.")] = False,
) -> None:
    """For a server with MLX's wired limit: the limit, and who waits.

    Also the macOS setting this needs.
    """
    from memfit.estimators.plans.wired.plan import plan_wired
    from memfit.estimators.plans.wired.scenario import read_scenario
    from memfit.probes.store import user_store

    read = read_scenario(scenario, user_store().get, partial(versions.versioned, strict=False))
    result = plan_wired(read)
    output.write(result, units=output.units, plot=output.draws(plot))
    raise typer.Exit(Exit.NO if result.verdict == "fails" else Exit.YES)
