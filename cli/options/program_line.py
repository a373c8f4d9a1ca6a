"""``--from LINE``: the settings of another program's command line as defaults of the options."""

import os
import shlex
from collections.abc import Container, Sequence

import typer
from msgspec import UNSET, UnsetType

from memfit.cli.options.groups import OptionGroup, option
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.questions.programs.reading import Line, read_line, starts_line
from memfit.estimators.results.program_line import ProgramLine as Shown

_NAME = "--from"
_COMMANDS = ("estimate", "plan")


def with_line(arguments: Sequence[str], commands: Container[str]) -> list[str]:
    """Return the arguments with the command that answers for a line, and the line after --from.

    ``commands`` are memfit's own.

    ``llama-server -m x.gguf``, alone or after ``--``, is the same as
    ``--from 'llama-server -m x.gguf'``.

    Raises:
        MemfitError: as `read_line`.
    """
    words = list(arguments)
    before, rest = [], [] if words and words[0] in commands else words
    if "--" in words:
        before, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    if starts_line(rest) and not os.path.isdir(rest[0]):
        words = [*before, _NAME, shlex.join(rest)]
    text = _line(words)
    if text is None or not (words[0] in _COMMANDS or words[0].startswith("-")):
        return words
    command = read_line(text).command.split()
    if words[: len(command)] == command:
        return words
    return [*command, *(words[1:] if words[0] == "estimate" else words)]


def _line(words: Sequence[str]) -> str | None:
    """The line after --from, None without one.

    Raises:
        InputError: when there are several.
    """
    own = words[: words.index("--")] if "--" in words else words
    texts = []
    for place, word in enumerate(own):
        name, sign, value = word.partition("=")
        if name == _NAME and (sign or place + 1 < len(own)):
            texts.append(value if sign else own[place + 1])
    if len(texts) > 1:
        raise InputError(f"{_NAME} is given {len(texts)} times: give it once")
    return texts[0] if texts else None


def _as_defaults(ctx: typer.Context, text: str | None) -> str | None:
    """Make the settings of a line what options are where they are not given."""
    if text is None:
        return None
    line = read_line(text)
    offered = {parameter.name for parameter in ctx.command.params}
    if missing := sorted(line.settings.keys() - offered):
        raise InputError(
            f"{line.shown.program}: {ctx.command_path} takes no {', '.join(map(setting, missing))};"
            f" memfit {line.command} --from LINE answers for it"
        )
    ctx.default_map = line.settings
    return text


class ProgramLine(OptionGroup, frozen=True, kw_only=True):
    """The command line of another program."""

    panel = "Options"
    line: Line | None = option(
        _NAME,
        metavar="LINE",
        is_eager=True,
        callback=_as_defaults,
        read=read_line,
        help="Take the settings of a command line of llama-server, llama-cli, mlx_lm.generate,"
        " mlx_lm.server, mlx_vlm.generate, mlx_vlm.server, vllm serve or ollama run, in quotes;"
        " or write it at the end, after --. Other options change it.",
    )

    def require_images(self, has_images: bool) -> None:
        """Check that a server of images has some to answer for.

        Raises:
            InputError: when it has none.
        """
        if self.line and self.line.needs_images and not has_images:
            raise InputError(
                f"{self.line.shown.program}: --image WxH says which images its requests have"
            )

    @property
    def shown(self) -> Shown | UnsetType:
        """What a result says of the line, unset without one."""
        return self.line.shown if self.line else UNSET
