"""The command line; ``main`` turns errors into messages and exit codes, nothing else does."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from memfit.cli.command_groups import LazyGroup, advice, option_name
from memfit.cli.exits import CommandStopped, Exit, exit_of
from memfit.cli.options.completion import undescribed
from memfit.cli.options.program_line import with_line
from memfit.cli.render.output import say
from memfit.estimators.base.errors import InputError, MemfitError
from memfit.estimators.base.setting_names import named_by
from memfit.estimators.base.version import __version__

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Commands(LazyGroup):
    """All commands; each is a module with a function or a sub-app of the same name.

    What begins neither with a command nor with an option of this group is for ``estimate``.
    """

    package = "memfit.cli.commands"
    summaries: ClassVar = {
        "estimate": "Estimate how much memory a model needs, and whether it fits.",
        "tune": "Run a model, and compare its memory with the estimate.",
        "tune experts": "Run a model with a part of its experts in memory.",
        "tune train": "Train a few steps, and compare their memory with the plan.",
        "tune disk": "Read experts, a layer and a file of a model from the disk, in three ways.",
        "tune cache": "Store the cache of prompts on the disk, and restore it.",
        "compare": "Compare models side by side, and show what fits where.",
        "fits": "List the models that fit a machine.",
        "server": "Show the most that mlx_lm.server takes, and the flags that fit.",
        "gate": "Check models against the limits of a policy file.",
        "diff": "Show what another version of mlx-lm or mlx-vlm changes, in bytes.",
        "plan": "Plan memory for requests, contexts and limits.",
        "compare-kit": "Compare what several machines measured with memfit tune --kit.",
        "devices": "List Macs and GPUs with the memory that a model can use.",
        "runtimes": "List runtimes, and how each allocates its cache.",
        "measurements": "Manage measurements of this machine, used by estimates.",
        "schema": "Print the JSON Schema of what a command writes.",
        "cache": "Manage the cached headers of models on the Hub.",
        "index": "Manage the index of published models.",
        "card": "Write the peak of a model as a table that any program can evaluate.",
        "serve": "Run mlx_lm.server behind a guard that keeps it below a limit.",
        "replay": "Show which requests a guard starts, lets wait or refuses.",
        "mcp": "Answer fits, estimate and admit as an MCP server over stdio.",
    }
    labels: ClassVar = {"estimate": "MODEL"}
    elsewhere: ClassVar = {"server": "memfit.cli.commands.plan.server"}
    sections: ClassVar = {
        "What most people need": ("estimate", "fits", "server", "compare", "tune", "gate"),
        "Plan": ("plan",),
        "Measure on this machine": (
            *("tune experts", "tune train", "tune cache", "tune disk"),
            *("measurements", "compare-kit"),
        ),
        "Look up": ("devices", "runtimes", "schema", "cache", "index"),
        "For other programs": ("card", "serve", "replay", "diff", "mcp"),
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``estimate`` where the arguments are its own; without any, answer for here."""
        args = with_line(args, self.commands)
        if not args and not ctx.resilient_parsing:
            args = _for_this_machine()
        elif args[:1] == ["fits"] and _is_model(args[1:2]):
            self._require_for_one(args[2:])
            args = ["estimate", *args[1:]]
        elif args and not self._is_own(ctx, args[0]):
            args = ["estimate", *args]
        return super().parse_args(ctx, args)

    def _require_for_one(self, args: list[str]) -> None:
        """Check that ``fits MODEL`` has no option of the list of models.

        Raises:
            InputError: when it has one.
        """
        of_list, of_one = (
            {name for option in self.load(each).params for name in option.opts}
            for each in ("fits", "estimate")
        )
        given = {word.partition("=")[0] for word in args}
        if only := sorted(given & (of_list - of_one)):
            raise InputError(
                f"{only[0]} is for the list of models that fit: leave it out, or the model's name"
            )

    def _is_own(self, ctx: Any, word: str) -> bool:
        if word.startswith("-"):
            name = word.partition("=")[0]
            return any(name in option.opts for option in self.get_params(ctx))
        return word in self.commands or self._is_typo(word)

    def _is_typo(self, word: str) -> bool:
        """Whether a word is nearly a command, and names no model."""
        if os.path.lexists(word) or not word.isalpha():  # no command has a digit
            return False
        from difflib import get_close_matches  # only a word that does not name a command needs it

        if not get_close_matches(word, self.commands):
            return False
        from memfit.estimators.checkpoint.index.names import find
        from memfit.estimators.checkpoint.index.records import index
        from memfit.estimators.checkpoint.local.samples import sample_names

        return word.lower() not in sample_names() and not find(word, index().names).best

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands and options, and the samples, which need no command."""
        names = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            return names
        model = next(each for each in self.load("estimate").params if each.name == "model")
        return names + undescribed(model.shell_complete(ctx, incomplete))


def _for_this_machine() -> list[str]:
    """The command without arguments: what fits this machine, else a sample on each Mac."""
    from memfit.cli.render.output import emit
    from memfit.estimators.machine.host import detect_host

    host = detect_host()
    if host and host.backend != "cpu":
        return ["fits", "--brief"]
    emit(
        "Here is no Mac and no NVIDIA GPU. Name a machine: memfit fits --device m4-max-64\n"
        "(memfit devices lists them), or its memory: memfit fits --memory 32GB. A sample:\n\n",
        None,
    )
    return ["estimate"]


def _is_model(words: list[str]) -> bool:
    """Whether the first word after ``fits`` names a model, and no folder."""
    return bool(words) and not words[0].startswith("-") and not os.path.lexists(words[0])


app = typer.Typer(
    cls=Commands,
    help="Size language models before you load them: weights, caches, workspace, and what fits.\n\n"
    "`memfit MODEL` is short for `memfit estimate MODEL`; a folder with the name of a command is"
    " ./NAME.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
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
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Holds the options that are given before a command."""


def main() -> None:
    """Run the command line and exit."""
    _open_streams()
    try:
        with named_by(option_name):
            sys.exit(app(prog_name="memfit", standalone_mode=False))
    except MemfitError as error:
        _leave(exit_of(error), *error.lines, slug=error.slug)
    except typer.TyperException as error:
        _leave_usage(error)
    except CommandStopped as stop:
        _leave(stop.code, str(stop), slug="stopped")
    except SystemExit as end:
        if end.code == Exit.INTERRUPTED:  # Typer exits without a message on Ctrl-C
            _leave(Exit.INTERRUPTED, "interrupted", slug="stopped")
        raise
    except Exception as error:
        if os.environ.get("MEMFIT_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            _leave_full(error)
        kind = type(error).__name__
        text = f"bug: {kind}: {error}; MEMFIT_DEBUG=1 shows where, please report it"
        _leave(Exit.BUG, text, slug="bug")


def _leave_usage(error: typer.TyperException) -> NoReturn:
    """Say what is wrong with the arguments, and which command shows the right ones."""
    context = getattr(error, "ctx", None)
    text = str(error) if hasattr(error, "option_name") else error.format_message().strip()
    if text.startswith("Usage:"):  # nothing was given
        print(text, file=sys.stderr)
        sys.exit(Exit.INPUT)
    path = context.command_path if context else "memfit"
    known = [name for each in context.command.params for name in each.opts] if context else []
    hint = advice(error, known, sys.argv[1:]) or f"{path} --help shows the options"
    _leave(Exit.INPUT, f"{text.rstrip('.')}; {hint}", slug="bad-input")


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


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether options ask for JSON; what is inside an argument, or after "--", is none."""
    options = list(takewhile(lambda word: word != "--", arguments))
    named = {"--json", "--format=json"}.intersection(options)
    return bool(named) or ("--format", "json") in pairwise(options)


def _report(code: Exit, message: str, *, slug: str) -> None:
    """Print an error as JSON to standard output, where JSON was requested."""
    if not _wants_json(sys.argv[1:]):
        return
    from memfit.cli.render.output import emit
    from memfit.cli.render.writers.json import to_json
    from memfit.estimators.results.error import error_report

    with suppress(InputError):  # its disk is full
        emit(to_json(error_report(slug, message, code)), None)
