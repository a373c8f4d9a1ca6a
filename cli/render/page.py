"""Collect text drawn for the terminal; styles only when standard output is a terminal."""

import io
import re
import sys
import textwrap

from msgspec import Struct
from rich.console import Console

from memfit.cli.render.escape import visible

# One character for one, so that columns stay aligned.
_ASCII = str.maketrans("±…−", "~~-")
_UNIT = re.compile(r"(?<=[0-9]) (?=[A-Za-z%])")
_NO_BREAK = "\ue000"  # a private-use character, in no text
_MAX_COLUMNS = 1000  # COLUMNS may be any number; no screen has more


class Page(Struct, frozen=True):
    """A buffered console."""

    console: Console
    ascii_only: bool
    """Whether the terminal's encoding lacks Unicode."""
    _buffer: io.StringIO

    def say(
        self, text: str, *, style: str = "", indent: int = 0, wraps: bool = True, end: str = "\n"
    ) -> None:
        """Draw a sentence, wrapped between words; a number and its unit stay together."""
        space = " " * indent
        lines = [space + visible(text)]
        if wraps:
            lines = textwrap.wrap(
                _UNIT.sub(_NO_BREAK, visible(text)),
                self.console.width,
                initial_indent=space,
                subsequent_indent=space,
                break_long_words=False,
                break_on_hyphens=False,
            )
        for line in lines:
            self.console.print(line.replace(_NO_BREAK, " "), style=style, soft_wrap=True, end=end)

    def text(self) -> str:
        """Return the text drawn so far, without trailing spaces."""
        lines = self._buffer.getvalue().split("\n")
        text = "\n".join(line.rstrip(" ") for line in lines)
        return text.translate(_ASCII) if self.ascii_only else text


def open_page(*, to_file: bool, least_width: int) -> Page:
    """Return a page as wide as the terminal, but at least ``least_width``."""
    terminal = Console(file=sys.stdout)
    buffer = io.StringIO()
    styled = terminal.is_terminal and not to_file
    console = Console(
        file=buffer,
        width=max(min(terminal.width, _MAX_COLUMNS), least_width),
        force_terminal=styled,
        color_system=terminal.color_system if styled else None,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    ascii_only = not (terminal.encoding or "").lower().startswith("utf") and not to_file
    return Page(console, ascii_only, buffer)
