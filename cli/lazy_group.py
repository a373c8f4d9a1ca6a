"""A group whose commands are imported when they are called: one command costs no other's start."""

from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


class LazyGroup(TyperGroup):
    """Command ``name`` is the function or the sub-app ``name`` of the module ``package.name``."""

    package: ClassVar[str]
    summaries: ClassVar[dict[str, str]]  # name to the line that --help shows

    def __init__(self, **attributes: Any) -> None:
        """Fill the places of the commands with what a listing needs of them."""
        super().__init__(**attributes)
        for name, summary in self.summaries.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command itself; an unknown name is refused as in any group."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name else None, rest

    def load(self, name: str) -> Any:
        """Import a command and return it as its group holds it."""
        found = getattr(import_module(f"{self.package}.{name}"), name)
        parent = typer.Typer(rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=name)
        else:
            parent.command(name)(found)
        return get_group(parent).commands[name]
