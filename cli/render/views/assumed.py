"""Mark every line of a document that rests on an assumption."""

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from memfit.cli.render.document import (
    Cell,
    Commands,
    Document,
    HeatMap,
    Table,
    Text,
    Toned,
    Verdict,
)

Part = TypeVar("Part")
MARK = "assumed: "


def marked(document: Document, model_type: str | None) -> Document:
    """Return the document with a mark on every line, but not in commands to paste.

    None: nothing is assumed.
    """
    return tuple(_marked(part, model_type) for part in document) if model_type else document


def _marked(part: Part, model_type: str) -> Part:
    match part:
        case Verdict():
            return replace(part, text=f"assumed to be {model_type}: {part.text}")
        case Text():
            lines = [f"{MARK}{line}" if isinstance(line, str) else line for line in part.lines]
            return replace(part, lines=lines)
        case Table():
            return replace(part, rows=[_row(row) for row in part.rows])
        case HeatMap():
            return replace(part, table=_marked(part.table, model_type))
        case Commands():
            return replace(part, heading=f"{MARK}{part.heading}")
        case _:
            return part


def _row(row: Sequence[Cell]) -> list[Cell]:
    first, *others = row
    if isinstance(first, Toned):
        return [Toned(f"{MARK}{first.text}", first.colour), *others]
    return [f"{MARK}{first}", *others]
