"""Expand groups of options to the flat signature that Typer reads."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from msgspec import Struct

from memfit.estimators.base.errors import InputError

Value = TypeVar("Value")


class OptionGroup(Struct, frozen=True):
    """Each field is an argument or an option of a command."""

    panel: ClassVar[str] = "Options"
    """The heading of the group in --help."""
    pasted: ClassVar[tuple[str, ...]] = ()
    """Fields that repeat others as another program has them; the library lacks them."""


class Option:
    """An option as `typer.Option` declares it; the library reads groups and imports no Typer."""

    def __init__(self, *names: str, help: str, **settings: Any) -> None:
        """Take the arguments of `typer.Option`."""
        self.names, self.help, self.settings = names, help, settings

    def declared(self, default: Any) -> Any:
        """Return it as the class of Typer with the same name."""
        import typer

        kind = getattr(typer, type(self).__name__)
        return kind(default, *self.names, help=self.help, **self.settings)


class Argument(Option):
    """An argument, as `typer.Argument` declares it."""


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
        default = fields[name].default
        if isinstance(option, Option):
            # As a default, which costs a tenth of an annotation.
            option = default = option.declared(... if default is Parameter.empty else default)
        else:
            option = copy(option)
            kind = Annotated[kind, option]
        option.rich_help_panel = group.panel
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


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
