"""Expand groups of options to the flat signature that Typer reads."""

import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from msgspec import Struct
from typer.core import TyperCommand

from memfit.cli.options.completion import undescribed
from memfit.estimators.base.errors import InputError

Value = TypeVar("Value")


class OptionGroup(Struct, frozen=True):
    """Each field is an argument or an option of a command."""

    panel: ClassVar[str] = "Options"
    """The heading of the group in --help."""
    pasted: ClassVar[tuple[str, ...]] = ()
    """Fields that repeat others as another program has them; the library lacks them."""


class Only:
    """Marks the options of a group that a command offers; the others keep their defaults."""

    def __init__(self, *names: str) -> None:
        """Take the names of the fields."""
        self.names = names


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one parameter for each option, which calls it with groups."""
    flat: list[Parameter] = []
    groups: dict[str, tuple[type[OptionGroup], list[str]]] = {}
    for name, parameter in signature(command).parameters.items():
        group, markers = _split(parameter.annotation)
        if isinstance(group, type) and issubclass(group, OptionGroup):
            options = list(_options(group, markers))
            groups[name] = group, [option.name for option in options]
            flat.extend(options)
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> None:
        for name, (group, fields) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        command(**values)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    return call


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type and the markers of ``Annotated[type, *markers]``."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, *markers = get_args(annotation)
    return kind, tuple(markers)


def _options(group: type[OptionGroup], markers: Iterable[Any]) -> Iterator[Parameter]:
    fields = dict(signature(group).parameters)
    offered = [name for marker in markers for name in marker.names] or list(fields)
    for name in offered:
        kind, (option,) = _split(fields[name].annotation)
        option = copy(option)
        option.rich_help_panel = group.panel
        yield fields[name].replace(kind=Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option])


_OPTION = re.compile(r"--[\w-]+")
# Not by its name: Python loads its table of names for that, and a Ctrl-C then is a SyntaxError.
_UNBROKEN = "\u2011"  # a non-breaking hyphen


def _record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """The name and the description of an option; its names in other programs are at the end."""
    names = parameter.opts
    if len([name for name in names if name.startswith("--")]) > 1 or len(names) > 2:
        parameter, (first, *others) = copy(parameter), names
        parameter.opts, parameter.help = [first], f"{parameter.help} Also {', '.join(others)}."
    found: tuple[str, str] | None = parameter.get_help_record(ctx)
    if found is None:
        return None
    # Lines would be broken at the hyphens of options.
    return found[0], _OPTION.sub(lambda name: name[0].replace("-", _UNBROKEN), found[1])


class GroupedCommand(TyperCommand):
    """A command with one section for each group in its --help.

    Typer shows panels with rich only, which is slow to import.
    """

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


def parsed(option: str, parse: Callable[[str], Value], text: str | None) -> Value | None:
    """Return the value of an option's text, None when it was not given.

    Raises:
        InputError: naming the option, when the text cannot be read.
    """
    if text is None:
        return None
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
