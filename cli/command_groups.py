"""Groups that import a command when it is called, and commands with options in sections."""

import re
from copy import copy
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from memfit.cli.options.arguments import (
    require_once,
    require_own,
    with_bits,
    with_lists,
    with_sequences,
)
from memfit.cli.options.completion import undescribed
from memfit.cli.options.groups import OptionGroup

_OPTION = re.compile(r"--[\w-]+")
# Not by its name: Python loads its table of names for that, and a Ctrl-C then is a SyntaxError.
_UNBROKEN = "\u2011"  # a non-breaking hyphen


class Group(TyperGroup):
    """A group with names only in completions: Typer imports rich for their descriptions."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands of one word and the options that begin with a text."""
        names = undescribed(super().shell_complete(ctx, incomplete))
        return [each for each in names if " " not in each.value]


class LazyGroup(Group):
    """Command ``name`` is the function or the sub-app ``name`` of the module ``package.name``.

    A name may have two words: ``tune cache`` is ``tune_cache``, and any other word after ``tune``
    is an argument of the command ``tune``. A folder named ``cache`` is then given as ``./cache``.
    """

    package: ClassVar[str]
    summaries: ClassVar[dict[str, str]]
    """Command name to its line in the group's --help."""

    def __init__(self, **attributes: Any) -> None:
        """Add a placeholder for each command, with its summary only."""
        super().__init__(**attributes)
        for name, summary in self.summaries.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Import and return the command; an unknown name is rejected as in any group."""
        if (two_words := " ".join(args[:2])) in self.summaries:
            args = [two_words, *args[2:]]
        name, _, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name else None, rest

    def load(self, name: str) -> Any:
        """Import a command and return it as a member of its group."""
        python_name = name.replace(" ", "_")
        command = getattr(import_module(f"{self.package}.{python_name}"), python_name)
        parent = typer.Typer(rich_markup_mode=None)
        if isinstance(command, typer.Typer):
            parent.add_typer(command, name=name)
        else:
            parent.command(name, cls=GroupedCommand)(command)
        return get_group(parent).commands[name]


def _record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """The name and the description of an option; its names in other programs are at the end."""
    names = parameter.opts
    if len([name for name in names if name.startswith("--")]) > 1 or len(names) > 2:
        parameter, (first, *others) = copy(parameter), names
        parameter.opts, parameter.help = [first], f"{parameter.help} Also {', '.join(others)}."
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    if record is None:
        return None
    # Lines would be broken at the hyphens of options.
    return record[0], _OPTION.sub(lambda name: name[0].replace("-", _UNBROKEN), record[1])


class GroupedCommand(TyperCommand):
    """A command with one section for each group in its --help.

    Typer shows panels with rich only, which is slow to import.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``-np``, ``-q 4`` and lists of machines as people write them.

        Raises:
            InputError: for an option that is given more than once and does not take several values.
        """
        known = {name for parameter in self.params for name in parameter.opts}
        require_own(args, known)
        args = with_lists(with_sequences(args) if "-np" in known else args, known)
        args = with_bits(args) if "-q" in known else args
        if not ctx.resilient_parsing:
            # Typer itself takes the last of them.
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            require_once(given)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the options that begin with a text."""
        return undescribed(super().shell_complete(ctx, incomplete))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options by group."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OptionGroup.panel: []}
        for parameter in self.get_params(ctx):
            record = _record(parameter, ctx)
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or OptionGroup.panel
            if record is not None:
                sections.setdefault("Arguments" if is_argument else panel, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        formatter.buffer = [text.replace(_UNBROKEN, "-") for text in formatter.buffer]
