"""``memfit plan``: plan memory for a model and a machine, with neither of them present."""

from typing import ClassVar

import typer

from memfit.cli.command_groups import LazyGroup


class Plans(LazyGroup):
    """Each plan is a module with a function of the same name."""

    package = "memfit.cli.commands.plan"
    summaries: ClassVar = {
        "context": "Show the contexts that fit, and how many requests at once.",
        "server": "Show the most that mlx_lm.server takes, and the flags that fit.",
        "train": "Show the memory of mlx_lm.lora, and which settings fit.",
        "ranks": "Show what more machines allow, or place models on a fleet.",
        "request": "Say how many tokens a request gets, and the answer of a server.",
        "wired": "Show the wired limit over time, and waiting or refused tickets.",
        "growth": "Show what sessions allocate and copy as they grow.",
        "experts": "Show memory and disk reads for numbers of experts kept in memory.",
        "offload": "Show the memory and disk space of cached conversations.",
        "static": "Place every intermediate of a recorded graph in one arena.",
    }


plan = typer.Typer(
    cls=Plans, help="Plan memory for requests, contexts and limits.", no_args_is_help=True
)


@plan.callback()
def root() -> None:
    """Makes `plan` a group, which has no command of its own."""
