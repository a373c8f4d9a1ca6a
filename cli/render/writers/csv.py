"""CSV: rows of fields; None becomes an empty cell."""

import csv
import io
from collections.abc import Iterable
from typing import Any, Protocol


class HasRows(Protocol):
    """What this writer needs."""

    def rows(self) -> Iterable[Iterable[Any]]:
        """Yield the headings, then each row."""


def write(view: HasRows, *, to_file: bool) -> str:
    """Return the view's rows as CSV text."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(view.rows())
    return buffer.getvalue()
