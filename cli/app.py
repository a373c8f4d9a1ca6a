"""The command line; ``main`` turns errors into messages and exit codes, nothing else does."""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from memfit.cli.exits import CommandStopped, Exit, exit_of
from memfit.cli.lazy_group import LazyGroup
from memfit.cli.render.escape import say
from memfit.estimators.base.errors import InputError, MemfitError
from memfit.estimators.base.version import __version__

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Commands(LazyGroup):
    """All commands; each is a module with a function or a sub-app of the same name."""

    package = "memfit.cli.commands"
    summaries: ClassVar = {
        "estimate": "Estimate how much memory a model needs, and whether it fits.",
        "tune": "Run a model, and compare its memory with the estimate.",
        "tune experts": "Run a model with a part of its experts in memory.",
        "compare": "Compare models side by side, and show what fits where.",
        "fits": "List the models that fit a machine.",
        "gate": "Check models against the limits of a policy file.",
        "plan": "Plan memory for requests, contexts and limits.",
        "devices": "List Macs and GPUs with the memory that a model can use.",
        "runtimes": "List runtimes, and how each allocates its cache.",
        "measurements": "Manage measurements of this machine, used by estimates.",
        "schema": "Print the JSON Schema of what a command writes.",
        "cache": "Manage the cached headers of models on the Hub.",
    }


app = typer.Typer(
    cls=Commands,
    help="Size language models before you load them: weights, caches, workspace, and what fits.",
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
    """Holds the options that are given before a command."""


def main() -> None:
    """Run the command line and exit."""
    _open_streams()
    try:
        app()
    except MemfitError as error:
        _leave(exit_of(error), *error.lines, slug=error.slug)
    except CommandStopped as stop:
        _leave(stop.code, str(stop), slug="stopped")
    except SystemExit as end:
        if end.code == Exit.INTERRUPTED:  # Typer exits without a message on Ctrl-C
            _leave(Exit.INTERRUPTED, "interrupted", slug="stopped")
        # Typer has written what is wrong with the options; a command's own code is an Exit.
        if end.code == Exit.INPUT and not isinstance(end.code, Exit):
            _report(Exit.INPUT, "the options are wrong; see standard error", slug="bad-input")
        raise
    except Exception as error:
        if os.environ.get("MEMFIT_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            _leave_full(error)
        kind = type(error).__name__
        text = f"bug: {kind}: {error}; MEMFIT_DEBUG=1 shows where, please report it"
        _leave(Exit.BUG, text, slug="bug")


class _Output(io.FileIO):
    """Standard output; what is written after the reader has closed its pipe is dropped."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(content)


def _open_streams() -> None:
    """Replace closed streams: no stream changes the exit code, and none takes another's output."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    elif isinstance(raw := getattr(sys.stdout.buffer, "raw", sys.stdout.buffer), io.FileIO):
        output = io.BufferedWriter(_Output(raw.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(output, sys.stdout.encoding, sys.stdout.errors)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _leave_full(error: OSError) -> NoReturn:
    # Typer writes help texts itself, so a full disk can also show up here.
    from memfit.cli.render.output import discard_stream

    discard_stream(sys.stdout)
    text = f"standard output or a file: cannot be written: {error.strerror}"
    _leave(Exit.INPUT, text, slug="bad-input")


def _leave(code: Exit, *messages: str, slug: str) -> NoReturn:
    for message in messages:
        say(message)
    _report(code, "\n".join(" ".join(message.split()) for message in messages), slug=slug)
    sys.exit(code)


def _report(code: Exit, message: str, *, slug: str) -> None:
    """Print an error as JSON to standard output, where JSON was requested."""
    arguments = sys.argv[1:]
    if "--json" not in arguments and "--format json" not in " ".join(arguments).replace("=", " "):
        return
    from memfit.cli.render.output import emit
    from memfit.cli.render.writers.json import to_json
    from memfit.estimators.results.error import error_report

    with suppress(InputError):  # its disk is full
        emit(to_json(error_report(slug, message, code)), None)
