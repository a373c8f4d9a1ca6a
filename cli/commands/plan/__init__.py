"""``memfit plan``: what follows from a model and a machine before either is at hand."""

from typing import ClassVar

import typer

from memfit.cli.lazy_group import LazyGroup


class Plans(LazyGroup):
    """Every plan: a module of its own with a function of the same name."""

    package = "memfit.cli.commands.plan"
    summaries: ClassVar = {
        "context": "Show the contexts that fit, and how many requests at once.",
        "request": "Say how many tokens a request gets, and the answer of a server.",
        "wired": "Show the wired limit over time, who waits and who is refused.",
        "growth": "Show what sessions allocate as they grow, and what is copied.",
        "experts": "Show memory and disk reads against the experts that are kept.",
        "offload": "Show what conversations take in memory and on disk.",
        "static": "Place every intermediate of a recorded graph in one arena.",
    }


plan = typer.Typer(
    cls=Plans, help="Plan memory for requests, contexts and limits.", no_args_is_help=True
)


@plan.callback()
def root() -> None:
    """Exists so that the group stands without a command of its own."""
