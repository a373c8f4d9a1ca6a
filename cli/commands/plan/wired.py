"""``memfit plan wired``: a scenario of tickets played through, and the limit to set for it."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options import Json, Output, PlanForm, PlanFormat, ShownUnits
from memfit.cli.render.output import emit
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
    """Show the wired limit over time, who waits and who is refused.

    And what macOS must allow for it.
    """
    # The library is imported when it is needed: --help stays quick.
    from memfit.cli.render.plan import wired as render
    from memfit.cli.render.plan.data import to_json
    from memfit.estimators.plans.wired.plan import plan_wired
    from memfit.estimators.plans.wired.scenario import read_scenario

    result = plan_wired(read_scenario(scenario), units)
    if json_ or format_ is PlanFormat.JSON:
        text = to_json(result)
    elif format_ is PlanFormat.MARKDOWN:
        text = render.to_markdown(result, units, plot=plot)
    else:
        text = render.to_table(result, units, plot=plot, to_file=output is not None)
    emit(text, output)
    raise typer.Exit(Exit.NO if result.verdict == "fails" else Exit.YES)
