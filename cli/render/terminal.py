"""A page drawn for the terminal: styled where it is one, plain where it is piped or a file."""

import io
import re
import sys
import textwrap

from rich.console import Console

from memfit.estimators.base.records import record

# One mark for one: columns stay where they are.
_ASCII = str.maketrans("±…", "~~")
_UNIT = re.compile(r"(?<=[0-9]) (?=[A-Za-z%])")
_HELD = "\ue000"  # of nobody's use
_MOST_COLUMNS = 1000  # no screen has more: COLUMNS may say anything


@record(frozen=True, slots=True)
class Page:
    """What is drawn on ``console`` becomes text; ``ascii_only`` terminals know no other marks."""

    console: Console
    ascii_only: bool
    _buffer: io.StringIO

    def say(self, text: str, *, style: str = "", indent: int = 0) -> None:
        """Draw a sentence, wrapped between words; a number keeps its unit."""
        space = " " * indent
        lines = textwrap.wrap(
            _UNIT.sub(_HELD, text),
            self.console.width,
            initial_indent=space,
            subsequent_indent=space,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines:
            self.console.print(line.replace(_HELD, " "), style=style, soft_wrap=True)

    def text(self) -> str:
        """Return what was drawn so far; no line ends in blanks."""
        lines = self._buffer.getvalue().split("\n")
        text = "\n".join(line.rstrip(" ") for line in lines)
        return text.translate(_ASCII) if self.ascii_only else text


def open_page(*, to_file: bool, least_width: int) -> Page:
    """Return a page as wide as the terminal, but never so narrow that numbers would be cut."""
    terminal = Console(file=sys.stdout)
    buffer = io.StringIO()
    styled = terminal.is_terminal and not to_file
    console = Console(
        file=buffer,
        width=max(min(terminal.width, _MOST_COLUMNS), least_width),
        force_terminal=styled,
        color_system=terminal.color_system if styled else None,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    ascii_only = not (terminal.encoding or "").lower().startswith("utf") and not to_file
    return Page(console, ascii_only, buffer)
