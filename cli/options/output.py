"""Options of the output: the format, the file and the units."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

import typer

from memfit.cli.options.groups import OptionGroup, option
from memfit.cli.render.output import DRAWN, Format, deliver, format_of
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units

if TYPE_CHECKING:
    from memfit.estimators.results.result import Result

VERBOSE = option("--verbose", "-v", default=False, help="Show each network request with its size.")
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
