"""``memfit plan wired``: simulate a scenario of tickets, and find the limit to set for it."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options import Json, Output, PlanForm, PlanFormat, ShownUnits
from memfit.estimators.base.units import Units


def wired(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A YAML file of policies and tickets.")
    ],
    plot: Annotated[bool, typer.Option("--plot", help="Draw limit and demand over time.")] = False,
    format_: PlanForm = PlanFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
) -> None:
    """Show the wired limit over time, and waiting or refused tickets.

    Also the macOS setting this needs.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.output import deliver
    from memfit.cli.render.view import Answer
    from memfit.cli.render.views.wired import to_document
    from memfit.estimators.plans.wired.plan import plan_wired
    from memfit.estimators.plans.wired.scenario import read_scenario

    result = plan_wired(read_scenario(scenario), units)
    document = to_document(result, units, plot=plot)
    deliver(Answer(result, document), "json" if json_ else format_.value, output)
    raise typer.Exit(Exit.NO if result.verdict == "fails" else Exit.YES)
