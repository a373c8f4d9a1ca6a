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
_LEAST_COLUMNS = 60  # below it numbers would be cut
_USUAL_LINES = 24
_MAX_COLUMNS = 1000  # COLUMNS may be any number; no screen has more


class Page(Struct, frozen=True):
    """A buffered console."""

    console: Console
    ascii_only: bool
    """Whether the terminal's encoding lacks Unicode."""
    height: int
    """Lines of the screen; parts that need room stay within them."""
    _buffer: io.StringIO

    def say(self, text: str, *, style: str = "", indent: int = 0, end: str = "\n") -> None:
        """Draw a sentence, wrapped between words; a number and its unit stay together."""
        space = " " * indent
        lines = textwrap.wrap(
            _UNIT.sub(_NO_BREAK, visible(text)),
            self.console.width,
            initial_indent=space,
            subsequent_indent=space,
            break_on_hyphens=False,
        )
        for line in lines or [""]:
            self.console.print(line.replace(_NO_BREAK, " "), style=style, soft_wrap=True, end=end)

    @property
    def lines(self) -> int:
        """How many lines were drawn so far."""
        return self._buffer.getvalue().count("\n")

    def take_back(self, length: int) -> None:
        """Remove everything that was drawn after the first characters."""
        self._buffer.seek(length)
        self._buffer.truncate()

    @property
    def length(self) -> int:
        """How many characters were drawn so far."""
        return self._buffer.tell()

    def text(self) -> str:
        """Return the text drawn so far, without trailing spaces."""
        lines = self._buffer.getvalue().split("\n")
        text = "\n".join(line.rstrip(" ") for line in lines)
        return text.translate(_ASCII) if self.ascii_only else text


def open_page(*, to_file: bool) -> Page:
    """Return a page as wide as the terminal, within reason."""
    terminal = Console(file=sys.stdout)
    buffer = io.StringIO()
    styled = terminal.is_terminal and not to_file
    console = Console(
        file=buffer,
        width=max(min(terminal.width, _MAX_COLUMNS), _LEAST_COLUMNS),
        force_terminal=styled,
        color_system=terminal.color_system if styled else None,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    ascii_only = not (terminal.encoding or "").lower().startswith("utf") and not to_file
    height = terminal.height if terminal.is_terminal else _USUAL_LINES
    return Page(console, ascii_only, max(height - 1, _USUAL_LINES), buffer)
