"""A group that imports a command only when it is called, so that every command starts fast."""

from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from memfit.cli.options.completion import undescribed


class Group(TyperGroup):
    """A group with names only in completions: Typer imports rich for their descriptions."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands of one word and the options that begin with a text."""
        found = undescribed(super().shell_complete(ctx, incomplete))
        return [each for each in found if " " not in each.value]


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
        found = getattr(import_module(f"{self.package}.{python_name}"), python_name)
        parent = typer.Typer(rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=name)
        else:
            from memfit.cli.grouped_command import GroupedCommand

            parent.command(name, cls=GroupedCommand)(found)
        return get_group(parent).commands[name]
