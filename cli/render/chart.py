"""Characters of charts, and a stacked bar."""

from collections.abc import Sequence

UNICODE_MARKS = ("█", "▓", "░", "│")
"""Three kinds of bytes, and a limit."""
ASCII_MARKS = ("#", "=", ".", "|")
LEAST_WIDTH = 20
"""Columns of the longest bar on a narrow terminal."""


def stacked_bar(
    parts: Sequence[int], whole: int, width: int, marks: Sequence[str], limit: int | None = None
) -> str:
    """Return a bar of parts in bytes, where ``whole`` bytes fill the width; a limit is a line.

    >>> stacked_bar((2, 1, 1), 8, 8, ASCII_MARKS, 6)
    '##=.  |'
    """
    bar, end = "", 0
    for nbytes, mark in zip(parts, marks, strict=False):
        end += nbytes
        bar += mark * (min(width, end * width // whole) - len(bar))
    bar = bar.ljust(width)
    if limit is not None:
        at = min(width - 1, limit * width // whole)
        bar = f"{bar[:at]}{marks[-1]}{bar[at + 1 :]}"
    return bar.rstrip()
