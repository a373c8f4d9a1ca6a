"""The groups of commands, and how their arguments are parsed."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from memfit.cli.options.completion import undescribed
from memfit.cli.options.groups import OptionGroup
from memfit.estimators.base.errors import InputError

LISTS = ("--device", "--memory")
"""Options that name a machine for each rank, with commas or given again."""
_NAMES = {"model": "MODEL", "as_type": "--as", "flash_attn": "--no-flash-attn"}
_BITS = r"[0-9](-?bits?)?|mxfp[48]|nvfp4"
_LEAVE = "it changes no memory that memfit counts: leave it out"
_SEQUENCES = "sequences at once are --batch, tokens computed at once --prefill-step"
FOREIGN = {
    **dict.fromkeys(("-b", "--batch-size"), _SEQUENCES),
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "write --max-tokens"),
    **dict.fromkeys(("-fa",), "flash attention is on; --no-flash-attn turns it off"),
    **dict.fromkeys(("--dtype", "--quantization"), "the config says it: leave it out"),
    "--as": "an architecture is assumed by memfit estimate, compare, plan context, plan server",
    "--hf-file": "write it after the name: org/name:file.gguf",
    "--revision": "write it after the name: org/name@revision",
    **dict.fromkeys(("--n-cpu-moe-draft", "--gpu-layers-draft", "-ngld"), "drafts are on the GPU"),
    **dict.fromkeys(
        (
            *("--host", "--port", "-t", "--threads", "--temp", "--top-p", "--top-k", "--seed"),
            *("--trust-remote-code", "--jinja", "--no-mmap", "--mlock", "--api-key", "--log-level"),
            *("--chat-template", "--served-model-name", "--enable-prefix-caching"),
        ),
        _LEAVE,
    ),
}


def option_name(name: str) -> str:
    """Return the option that gives a setting.

    >>> option_name("kv_bits"), option_name("as_type")
    ('--kv-bits', '--as')
    """
    return _NAMES.get(name, f"--{name.replace('_', '-')}")


def with_sequences(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with -np in place of a --parallel that has a number.

    >>> with_sequences(["--parallel", "4", "--parallel=pipeline"])
    ['-np', '4', '--parallel=pipeline']
    """
    words = [part for word in arguments for part in _name_and_value(word)]
    return [
        "-np" if word == "--parallel" and value.isdecimal() else word
        for word, value in pairwise([*words, ""])
    ]


def require_own(arguments: Sequence[str], known: Iterable[str]) -> None:
    """Check that no option of another program is read as letters: -ot does not mean -o t.

    Raises:
        InputError: naming the option, and what to write in its place.
    """
    own = set(known)
    for name in arguments:
        if name in FOREIGN and name not in own and name[:2] in own:
            raise InputError(f"no such option: {name}: {FOREIGN[name]}")


def with_bits(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --quantize in place of a -q that has bits or a format.

    >>> with_bits(["-q", "4", "-q", "model"])
    ['--quantize', '4', '-q', 'model']
    """
    return [
        "--quantize" if word == "-q" and re.fullmatch(_BITS, value) else word
        for word, value in pairwise([*arguments, ""])
    ]


def _name_and_value(word: str) -> Sequence[str]:
    name, _, value = word.partition("=")
    return (name, value) if name == "--parallel" and value.isdecimal() else (word,)


def advice(error: Exception, known: Iterable[str], arguments: Sequence[str]) -> str:
    """Return what to write in place of an option that a command does not have, else nothing."""
    if "--parallel" in getattr(getattr(error, "param", None), "opts", ()):
        return "llama.cpp's number of sequences is -np"
    near: Sequence[str] | None = getattr(error, "possibilities", None)
    if not hasattr(error, "option_name"):
        return ""
    own = set(known)
    # Typer names only the first letter of an option with one dash.
    names = (word.partition("=")[0] for word in arguments)
    if name := next((name for name in names if name in FOREIGN and name not in own), ""):
        return f"{name}: {FOREIGN[name]}"
    return f"nearest: {', '.join(near)}" if near else ""


def with_lists(arguments: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the arguments of a command with the machines of several ranks in one list.

    >>> with_lists(["--memory", "64GB", "-v", "--memory=32GB"], ["--memory", "--ranks"])
    ['--memory', '64GB,32GB', '-v']
    """
    words = list(arguments)
    if "--ranks" not in known:
        return words
    for option in filter(set(known).__contains__, LISTS):
        values, places = [], []
        for place, word in enumerate(words):
            name, sign, value = word.partition("=")
            if name == option and (sign or place + 1 < len(words)):
                values.append(value if sign else words[place + 1])
                places.append(range(place, place + 2 - len(sign)))
        if len(places) > 1:
            gone = {place for span in places for place in span}
            first = places[0].start
            rest = [word for place, word in enumerate(words) if place > first and place not in gone]
            words = [*words[:first], option, ",".join(values), *rest]
    return words


def require_once(given: Iterable[Any]) -> None:
    """Check the options that were given, in their order: only a list may be there more than once.

    A switch without a value may be repeated, which changes nothing.

    Raises:
        InputError: for another one, of which only the last would count.
    """
    for option, times in Counter(given).items():
        is_switch = getattr(option, "is_flag", False) and not option.secondary_opts
        if times > 1 and not (option.multiple or option.nargs == -1 or is_switch):
            names: list[str] = option.opts + option.secondary_opts
            also = f" ({', '.join(names[1:])} is the same option)" if names[1:] else ""
            raise InputError(f"{names[0]} is given {times} times: give it once{also}")


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
    sections: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Heading in the group's --help to its commands; the others follow under "Commands"."""
    labels: ClassVar[dict[str, str]] = {}
    """Command name to what stands for it in the group's --help."""
    elsewhere: ClassVar[dict[str, str]] = {}
    """Command name to the module of the same function, for a command of another group."""

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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their sections."""
        placed = {name for names in self.sections.values() for name in names}
        others = tuple(name for name in self.summaries if name not in placed)
        for title, names in {**self.sections, "Commands": others}.items():
            if names:
                with formatter.section(title):
                    rows = [(self.labels.get(name, name), self.summaries[name]) for name in names]
                    formatter.write_dl(rows)

    def load(self, name: str) -> Any:
        """Import a command and return it as a member of its group."""
        python_name = name.replace(" ", "_").replace("-", "_")
        module = self.elsewhere.get(name, f"{self.package}.{python_name}")
        command = getattr(import_module(module), python_name)
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


SHARED_PANELS = {
    f"{kind} options" for kind in ("Model", "Workload", "Machine", "Runtime", "Output")
}
"""The groups of options that many commands have."""
COMMON = {
    *("quantize", "context", "max_tokens", "batch", "prefill_step", "kv_bits", "image"),
    *("device", "memory", "ranks", "runtime", "explain", "json_", "file"),
    *("prompt", "prompt_tokens"),  # of commands that run a model
}
"""The shared options that most people use, by their settings."""
_FEW = 15
"""A command with at most this many options shows all of them in its --help."""


def _show_all(ctx: Any, _: Any, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_show_all.__name__] = True
        print(ctx.get_help())
        ctx.exit()


class GroupedCommand(TyperCommand):
    """A command with one section for each group in its --help.

    Of many options --help shows those of the command and the most common of the shared groups;
    --help-all shows every one. Typer shows panels with rich only, which is slow to import.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; a command with many options has --help-all too."""
        parameters: list[Any] = super().get_params(ctx)
        return [*parameters, self._help_all] if self._is_long else parameters

    @property
    def _is_long(self) -> bool:
        return sum(each.param_type_name == "option" for each in self.params) > _FEW

    @cached_property
    def _help_all(self) -> Any:
        return TyperOption(
            param_decls=["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show every option and exit.",
        )

    def _is_shown(self, parameter: Any, ctx: Any) -> bool:
        """Whether the short --help has a parameter."""
        panel = getattr(parameter, "rich_help_panel", None)
        is_own = parameter.param_type_name == "argument" or panel not in SHARED_PANELS
        shows_all = not self._is_long or ctx.meta.get(_show_all.__name__, False)
        return is_own or shows_all or parameter.name in COMMON

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
        shown = [each for each in self.get_params(ctx) if self._is_shown(each, ctx)]
        for parameter in shown:
            record = _record(parameter, ctx)
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or OptionGroup.panel
            if record is not None:
                sections.setdefault("Arguments" if is_argument else panel, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if hidden := len(self.get_params(ctx)) - len(shown):
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: {ctx.command_path} --help-all")
        formatter.buffer = [text.replace(_UNBROKEN, "-") for text in formatter.buffer]
