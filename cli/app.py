"""The command line; ``main`` is the one place where an error becomes a message and a code."""

import errno
import os
import sys
from typing import Annotated, ClassVar, NoReturn

import typer

from memfit.cli.exits import CommandStopped, Exit, exit_of
from memfit.cli.lazy_group import LazyGroup
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.version import __version__

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Commands(LazyGroup):
    """Every command: a module of its own with a function or a sub-app of the same name."""

    package = "memfit.cli.commands"
    summaries: ClassVar = {
        "estimate": "Say how much memory a model takes, and whether it fits.",
        "tune": "Load a model, and hold what it takes against the estimate.",
        "compare": "Show models side by side, and what fits where.",
        "gate": "Say whether models still fit, by a policy file.",
        "plan": "Plan memory for requests, contexts and limits.",
        "devices": "List Macs and GPUs with the memory a model can have there.",
        "runtimes": "List runtimes, and how each allocates its cache.",
        "measurements": "What was measured on this machine, kept for estimates.",
        "cache": "Headers kept of models on the Hub.",
    }


app = typer.Typer(
    cls=Commands,
    help="Size language models before they are loaded: weights, caches, workspace, and what fits.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from memfit.cli.render.output import emit

        emit(f"memfit {__version__}\n", None)
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
    if sys.stderr is None:  # closed: print would take standard output for it
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        app()
    except MemfitError as error:
        _leave(exit_of(error), *error.lines)
    except CommandStopped as stop:
        _leave(stop.code, str(stop))
    except SystemExit as end:
        if end.code == Exit.INTERRUPTED:  # Typer's, for Ctrl-C: it leaves without a word
            _leave(Exit.INTERRUPTED, "interrupted")
        raise
    except Exception as error:
        if os.environ.get("MEMFIT_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _FULL:
            _leave_full(error)
        kind = type(error).__name__
        _leave(Exit.BUG, f"bug: {kind}: {error}; MEMFIT_DEBUG=1 shows where, please report it")


def _leave_full(error: OSError) -> NoReturn:
    """Typer writes a help by itself."""
    from memfit.cli.render.output import let_go

    if sys.stdout is not None:
        let_go(sys.stdout)
    _leave(Exit.INPUT, f"standard output or a file: cannot be written: {error.strerror}")


def _leave(code: Exit, *messages: str) -> NoReturn:
    for message in messages:
        line = " ".join(message.split())
        print(f"memfit: {line}", file=sys.stderr)
    sys.exit(code)
