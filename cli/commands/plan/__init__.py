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
        "together": "Show which models fit a machine at once, and what to unload.",
        "convert": "Show the memory and the disk that mlx_lm.convert takes.",
        "request": "For a scheduler: the tokens that one request gets, or why none.",
        "wired": "For a server with MLX's wired limit: the limit, and who waits.",
        "growth": "For long sessions: what they allocate and copy as they grow.",
        "experts": "For a mixture too large for memory: how many experts to keep.",
        "offload": "For agents that take turns: conversations in memory and on disk.",
        "static": "For an engine that allocates at start: one arena for its graph.",
    }
    sections: ClassVar = {
        "Plans": ("context", "server", "together", "train", "ranks", "convert"),
        "Tight memory": ("experts", "offload", "wired", "growth", "static", "request"),
    }


plan = typer.Typer(
    cls=Plans, help="Plan memory for requests, contexts and limits.", no_args_is_help=True
)


@plan.callback()
def root() -> None:
    """Makes `plan` a group, which has no command of its own."""
