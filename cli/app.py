"""The command line; ``main`` is the one place where an error becomes a message and a code."""

import gc
import os
import sys
from typing import Annotated

import typer

from memfit.cli.commands.cache import cache
from memfit.cli.commands.compare import compare
from memfit.cli.commands.devices import devices
from memfit.cli.commands.estimate import estimate
from memfit.cli.commands.gate import gate
from memfit.cli.commands.plan import plan
from memfit.cli.commands.runtimes import runtimes
from memfit.cli.exits import Exit, exit_of
from memfit.estimators.errors import MemfitError
from memfit.estimators.version import __version__

app = typer.Typer(
    help="Size language models before they are loaded: weights, caches, workspace, and what fits.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
app.command()(estimate)
app.command()(compare)
app.add_typer(gate, name="gate")
app.add_typer(plan, name="plan")
app.command()(devices)
app.command()(runtimes)
app.add_typer(cache, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Exists for the options that stand before a command."""


def main() -> None:
    """Run the command line and exit."""
    # A short process: frequent collections cost a fifteenth of its time and free nothing.
    gc.set_threshold(100_000)
    try:
        app()
    except MemfitError as error:
        _leave(exit_of(error), *error.lines)
    except BrokenPipeError:
        # The reader went away; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.YES)
    except KeyboardInterrupt:
        _leave(Exit.INTERRUPTED, "interrupted")
    except Exception as error:
        if os.environ.get("MEMFIT_DEBUG"):
            raise
        kind = type(error).__name__
        _leave(Exit.BUG, f"bug: {kind}: {error}; MEMFIT_DEBUG=1 shows where, please report it")


def _leave(code: Exit, *messages: str) -> None:
    for message in messages:
        line = " ".join(message.split())
        print(f"memfit: {line}", file=sys.stderr)
    sys.exit(code)
