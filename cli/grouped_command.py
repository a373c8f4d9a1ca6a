"""A command with its options in sections."""

import re
from copy import copy
from typing import Any

from typer.core import TyperCommand

from memfit.cli.options.completion import undescribed
from memfit.cli.options.foreign import require_own, with_bits, with_sequences
from memfit.cli.options.groups import OptionGroup
from memfit.cli.options.repeats import require_once, with_lists

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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``-np``, ``-q 4`` and lists of machines as people write them.

        Raises:
            InputError: for an option that is given more than once and is no list.
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
