"""``memfit plan request``: what a request may still generate, and whether a server takes it."""

from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.estimators.base.units import parse_count


class RequestOptions(OptionGroup, frozen=True, kw_only=True):
    """The request, and the window that it shares."""

    used: int = option(
        help="Tokens in the window, the prompt included.", default=..., read=parse_count
    )
    requested: int = option(help="Tokens to generate.", default=..., read=parse_count)
    capacity: int = option(
        help="Tokens of the whole window, such as 32k.", default=..., read=parse_count
    )


@grouped
def request(
    request: RequestOptions,
    output: Annotated[PlanOutput, Only("format_", "json_", "file")],
) -> None:
    """For a scheduler: the tokens that one request gets, or why none."""
    from memfit.estimators.runtimes.zinc.requests import plan_request

    result = plan_request(request.used, request.requested, request.capacity)
    output.write(result)
    raise typer.Exit(Exit.NO if result.admission == "refused" else Exit.YES)
