"""Expand groups of options to the flat signature that Typer reads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ClassVar, get_args, get_origin

import typer
from msgspec import Struct

from memfit.estimators.questions.question import Question, read_setting


class OptionGroup(Struct, frozen=True):
    """Options of one command: each field is an argument or an option.

    ``Annotated[type, option, reader]`` has the value that the reader makes of a text.
    """

    panel: ClassVar[str] = "Options"
    """The heading of the group in --help."""


class Option:
    """An option of a question, as `typer.Option` declares it."""

    declared: ClassVar[Callable[..., Any]] = typer.Option

    def __init__(
        self, *names: str, help: str, kind: Any = str, default: Any = None, **settings: Any
    ) -> None:
        """Take the type that Typer reads, its default, and the arguments of `typer.Option`.

        Without a default it is that of the question.
        """
        self.names, self.help, self.kind, self.default = names, help, kind, default
        self.settings = settings

    def parameter(self, name: str, default: Any, panel: str) -> Parameter:
        """Return it as a parameter of a command."""
        default = default if self.default is None else self.default
        # As a default, which costs a tenth of an annotation.
        info = type(self).declared(default, *self.names, help=self.help, **self.settings)
        info.rich_help_panel = panel
        kind = self.kind if default is not None else self.kind | None
        return Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=kind)


class Argument(Option):
    """An argument, as `typer.Argument` declares it."""

    declared = typer.Argument


class Options:
    """The options of a question, by the names of its settings, and those of other programs."""

    def __init__(
        self,
        question: type[Question],
        panel: str,
        declared: Mapping[str, Option],
        translated: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        """Take a declaration for each option.

        ``translated`` turns options of other programs into settings of the question.
        """
        self.question, self.panel = question, panel
        self.declared, self.translated = declared, translated

    def parameters(self, names: Sequence[str]) -> Iterator[Parameter]:
        """Yield a parameter for each option, or for those of some names."""
        defaults = dict(
            zip(self.question.__struct_fields__, self.question.__struct_defaults__, strict=True)
        )
        for name in names or self.declared:
            default = defaults.get(name)
            yield self.declared[name].parameter(
                name, None if default == () else default, self.panel
            )

    def group(self, **values: Any) -> Question:
        """Return the question."""
        given = {name: value for name, value in values.items() if value is not None}
        return self.question.read(self.translated(given))


class Only:
    """Marks the options of a group that a command offers; the others keep their defaults."""

    def __init__(self, *names: str) -> None:
        """Take the names of the fields."""
        self.names = names


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one parameter for each option, which calls it with groups.

    Commands import what computes and draws inside of them, so that --help stays fast.
    """
    flat: list[Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in signature(command).parameters.items():
        kind, markers = _split(parameter.annotation)
        # A type that is narrowed again has several.
        offered = ((), *(each.names for each in markers if isinstance(each, Only)))[-1]
        options = next((each for each in markers if isinstance(each, Options)), None)
        make: Callable[..., Any]
        if options:
            parameters, make = list(options.parameters(offered)), options.group
        elif isinstance(kind, type) and issubclass(kind, OptionGroup):
            parameters, make = _of_group(kind, offered)
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        groups[name] = make, [option.name for option in parameters]
        flat.extend(parameters)

    def call(**values: Any) -> None:
        for name, (make, fields) in groups.items():
            values[name] = make(**{field: values.pop(field) for field in fields})
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


def _of_group(
    group: type[OptionGroup], offered: Sequence[str]
) -> tuple[list[Parameter], Callable[..., OptionGroup]]:
    """Return the parameters of a group, and what makes the group of their values."""
    fields = dict(signature(group).parameters)
    parameters: list[Parameter] = []
    readers: dict[str, Callable[[Any], Any]] = {}
    for name in offered or fields:
        default = fields[name].default
        kind, (option, *reader) = _split(fields[name].annotation)
        if reader:
            readers[name] = reader[0]
            kind = str | None if default is None else str
            default = default if default in (None, Parameter.empty) else _text(default)
        option = copy(option)
        option.rich_help_panel = group.panel
        kind = Annotated[kind, option]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))

    def make(**values: Any) -> OptionGroup:
        for name, read in readers.items():
            if values[name] is not None:
                values[name] = read_setting(name, read, values[name])
        return group(**values)

    return parameters, make


def _text(value: Any) -> str:
    """Return a default as it is written: several values with commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
