"""A page drawn for the terminal: styled where it is one, plain where it is piped or a file."""

import io
import sys

from rich.console import Console

from memfit.estimators.records import record

# One mark for one: columns stay where they are.
_ASCII = str.maketrans("±…", "~~")


@record(frozen=True, slots=True)
class Page:
    """What is drawn on ``console`` becomes text; ``ascii_only`` terminals know no other marks."""

    console: Console
    ascii_only: bool
    _buffer: io.StringIO

    def text(self) -> str:
        """Return what was drawn so far."""
        text = self._buffer.getvalue()
        return text.translate(_ASCII) if self.ascii_only else text


def open_page(*, to_file: bool, least_width: int) -> Page:
    """Return a page as wide as the terminal, but never so narrow that numbers would be cut."""
    terminal = Console(file=sys.stdout)
    buffer = io.StringIO()
    styled = terminal.is_terminal and not to_file
    console = Console(
        file=buffer,
        width=max(terminal.width, least_width),
        force_terminal=styled,
        color_system=terminal.color_system if styled else None,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    ascii_only = not (terminal.encoding or "").lower().startswith("utf") and not to_file
    return Page(console, ascii_only, buffer)
