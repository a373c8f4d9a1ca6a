"""``memfit plan request``: what a request may still generate, and whether a server takes it."""

from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, grouped, parsed
from memfit.cli.options.output import PlanOutput
from memfit.estimators.base.units import parse_count


@grouped
def request(
    used: Annotated[str, typer.Option(help="Tokens in the window, the prompt included.")],
    requested: Annotated[str, typer.Option(help="Tokens to generate.")],
    capacity: Annotated[str, typer.Option(help="Tokens of the whole window, such as 32k.")],
    output: Annotated[PlanOutput, Only("format_", "json_", "file")],
) -> None:
    """Say how many tokens a request gets, and the answer of a server."""
    from memfit.estimators.runtimes.zinc.requests import plan_request

    result = plan_request(
        parsed("--used", parse_count, used) or 0,
        parsed("--requested", parse_count, requested) or 0,
        parsed("--capacity", parse_count, capacity) or 0,
    )
    output.write(result)
    raise typer.Exit(Exit.NO if result.admission == "refused" else Exit.YES)
