"""``memfit plan``: what follows from a model and a machine before either is at hand.

One module a subcommand; each is added to the sub-app here.
"""

import typer

from memfit.cli.commands.plan.context import context
from memfit.cli.commands.plan.experts import experts
from memfit.cli.commands.plan.growth import growth
from memfit.cli.commands.plan.offload import offload
from memfit.cli.commands.plan.request import request
from memfit.cli.commands.plan.static import static
from memfit.cli.commands.plan.wired import wired

plan = typer.Typer(help="Plan memory for requests, contexts and limits.", no_args_is_help=True)


@plan.callback()
def root() -> None:
    """Exists so that a single subcommand keeps its name."""


plan.command()(context)
plan.command()(request)
plan.command()(wired)
plan.command()(growth)
plan.command()(experts)
plan.command()(offload)
plan.command()(static)
