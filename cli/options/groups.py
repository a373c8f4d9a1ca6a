"""Groups of options: their declaration, and the group of the output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from msgspec import Struct

from memfit.cli.render.output import DRAWN, Format, deliver, format_of
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units
from memfit.estimators.questions.question import Question, read_setting

if TYPE_CHECKING:
    from memfit.estimators.results.result import Result


class OptionGroup(Struct, frozen=True):
    """Options of one command: each field has an `option` or an `argument` as its default.

    `grouped` makes the group of what Typer read.
    """

    panel: ClassVar[str] = "Options"
    """The heading of the group in --help."""


class Option:
    """An option as `typer.Option` declares it, or an argument."""

    def __init__(
        self,
        declared: Callable[..., Any],
        names: Sequence[str],
        kind: Any,
        default: Any,
        read: Callable[[str], Any] | None,
        settings: Mapping[str, Any],
    ) -> None:
        """Take the arguments of Typer, and what reads the text of the option."""
        self.kind, self.default, self.read = kind, default, read
        self._declared, self._names, self._settings = declared, names, settings

    def parameter(self, name: str, kind: Any, default: Any, panel: str) -> Parameter:
        """Return it as a parameter of a command."""
        if self.read:
            kind = str | None if default is None else str
            default = default if default in (None, ...) else _text(default)
        # As a default, which costs a tenth of an annotation.
        info = self._declared(default, *self._names, **self._settings)
        info.rich_help_panel = info.rich_help_panel or panel
        return Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def option(
    *names: str,
    kind: Any = str,
    default: Any = None,
    read: Callable[[str], Any] | None = None,
    **settings: Any,
) -> Any:
    """Declare an option with the arguments of `typer.Option`; one without a default has ``...``.

    ``read`` makes the value of a text. A question has the type that Typer reads as ``kind``, and
    its own default; a group annotates the field.
    """
    return Option(typer.Option, names, kind, default, read, settings)


def argument(*, kind: Any = str, default: Any = None, **settings: Any) -> Any:
    """Declare an argument with those of `typer.Argument`."""
    return Option(typer.Argument, (), kind, default, None, settings)


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
        fields, defaults = self.question.__struct_fields__, self.question.__struct_defaults__
        own = dict(zip(fields, defaults, strict=True))
        for name in names or self.declared:
            option = self.declared[name]
            default = own.get(name) or None if option.default is None else option.default
            kind = option.kind | None if default is None else option.kind
            yield option.parameter(name, kind, default, self.panel)

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
    fields = signature(group).parameters
    options: dict[str, Option] = {name: field.default for name, field in fields.items()}
    parameters = [
        options[name].parameter(name, fields[name].annotation, options[name].default, group.panel)
        for name in offered or fields
    ]

    def make(**values: Any) -> OptionGroup:
        for name, value in values.items():
            if value is not None and (read := options[name].read):
                values[name] = read_setting(name, read, value)
        defaults = {name: declared.default for name, declared in options.items()}
        return group(**{**defaults, **values})

    return parameters, make


def _text(value: Any) -> str:
    """Return a default as it is written: several values with commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


VERBOSE = option("--verbose", "-v", default=False, help="Show each network request with its size.")
TICKETS = option(
    help="Print only the tickets of MLX's wired limit: a scenario of memfit plan wired, Python or"
    " Swift."
)
TICKET_SUFFIXES = {"yaml": (".yaml", ".yml"), "python": (".py",), "swift": (".swift",)}
FORMAT = option("--format", default="table", is_eager=True, help="Output format.")


def _reject_format_and_json(ctx: typer.Context, json_: bool) -> bool:
    """Reject --json with --format; --format is eager, so it is parsed first in any order."""
    source = ctx.get_parameter_source("format_")
    if json_ and source is not None and source.name == "COMMANDLINE":
        raise InputError("--json and --format both set the output format: give one of them")
    return json_


JSON = option(
    "--json",
    default=False,
    callback=_reject_format_and_json,
    help="Print JSON, as --format json does.",
)


class OutputOptions(OptionGroup, frozen=True, kw_only=True):
    """How and where a result is written."""

    panel = "Output options"
    format_: Format = FORMAT
    json_: bool = JSON
    file: Path | None = option(
        "--output", "-o", help="Write the result to a file, in the format of its suffix."
    )
    units: Units = option(help="Units of sizes: decimal or binary.", default=Units.GB)
    verbose: bool = VERBOSE

    @property
    def form(self) -> Format:
        """The format that --json or --format sets, else the one of the file's suffix.

        Raises:
            InputError: when the command has no format of that suffix.
        """
        if self.json_:
            return "json"
        if self.file is None or self.format_ != "table" or not self.file.suffix:
            return self.format_
        return format_of(self.file, get_args(get_type_hints(type(self))["format_"]))

    def require_tickets_alone(self, tickets: str | None, others: Mapping[str, object]) -> None:
        """Check that nothing else is to be written where --tickets are.

        ``others`` are values of options by their names; one that is true is refused.

        Raises:
            InputError: naming the option to leave out, or the suffix of the file.
        """
        if tickets is None:
            return
        others = {"--json": self.json_, "--format": self.format_ != "table", **others}
        if given := next((name for name, value in others.items() if value), None):
            raise InputError(f"--tickets writes the tickets alone: leave out {given}")
        suffixes = TICKET_SUFFIXES[tickets]
        if self.file and self.file.suffix.lower() not in (*suffixes, ".txt", ""):
            raise InputError(
                f"{self.file}: --tickets {tickets} writes no such file; give -o a name that ends in"
                f" {suffixes[0]}"
            )

    def draws(self, plot: bool) -> bool:
        """Return whether the result has charts: with --plot, and always in a drawn format."""
        return plot or self.form in DRAWN

    @property
    def to_file(self) -> bool:
        """Whether the result goes to a file."""
        return self.file is not None

    def write(self, result: "Result", **settings: Any) -> None:
        """Write a result in the format to the file, else to standard output.

        ``settings`` are those of its view.

        Raises:
            InputError: when the file cannot be written.
        """
        from memfit.cli.render.view import view_of

        deliver(view_of(result, **settings), self.form, self.file)


class TabularOutput(OutputOptions, frozen=True, kw_only=True):
    """The output of a command with rows, which can be CSV."""

    format_: Literal["table", "json", "csv", "markdown", "html", "svg"] = FORMAT


class PlanOutput(OutputOptions, frozen=True, kw_only=True):
    """The output of a plan."""

    format_: Literal["table", "json", "markdown", "html", "svg"] = FORMAT
