"""A result as plain data: texts, tables and charts. Views make documents, writers format them.

No text in a document is escaped: each writer does that for its format.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

VERDICT_COLOURS = {"fits": "green", "tight": "yellow", "exceeds": "red", "unknown": "default"}


class Pair(NamedTuple):
    """A problem and its remedy."""

    problem: str
    remedy: str


class Toned(NamedTuple):
    """A text in a colour, which only repeats what the text says."""

    text: str
    colour: str

    def __str__(self) -> str:
        return self.text


Cell = str | int | bool | Toned
"""A text, an amount that is drawn as a bar, or whether a check passed."""


class Part(Struct, frozen=True, kw_only=True):
    """A part of a document."""

    only: Literal["", "terminal", "page"] = ""
    """Where it is shown; a page is Markdown. Empty: everywhere."""
    needs_room: bool = False
    """Whether the terminal leaves it out when the screen is full."""
    otherwise: str = ""
    """A line that the terminal shows in place of a part that needs room."""


class Heading(Part, frozen=True):
    """The title of the document, or of a section."""

    text: str
    level: int = 2
    status: str = ""
    """A status after the text."""
    colour: str = ""
    """The colour of the status."""


class Text(Part, frozen=True):
    """Lines of text, with a heading of their own or without; not shown without lines."""

    lines: Sequence[str | Pair]
    heading: str = ""
    style: str = ""
    """Of the terminal."""
    mark: Literal["", "-", "1.", "!"] = ""
    """Kind of list: none, bullets, numbers or warnings."""
    indent: int = 0
    gap: bool = False
    """Whether an empty line precedes the text on the terminal."""
    strong: bool = False
    """Whether a page stresses the text."""


class Table(Part, frozen=True):
    """Rows of cells below headings."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    align: str = "lr"
    """A letter for each column, the last for all that follow: left, right, or b for bars."""
    wrapped: Sequence[int] = (0,)
    """Columns that wrap on a narrow terminal; numbers are never wrapped."""
    whole: int = 1
    """The amount that fills a bar."""
    has_total: bool = False
    """Whether the last row is a total."""
    gap: bool = True
    droppable: Sequence[int] = ()
    """Columns that a narrow terminal leaves out, the first of them first; a line says so."""

    def aligned(self, column: int) -> str:
        """Return the letter of a column."""
        return self.align[min(column, len(self.align) - 1)]


class Column(Struct, frozen=True):
    """A column of cells that have several parts, which are aligned."""

    heading: str
    cells: Sequence[Sequence[str]]
    is_left: bool = False
    """Whether the first and the last part of a cell are aligned left."""
    page_headings: Sequence[str] = ()
    """Headings on a page: one for each part, or one for all."""


class Columns(Part, frozen=True):
    """Columns side by side; a narrow terminal shows them in blocks that repeat the fixed ones."""

    fixed: Sequence[Column]
    others: Sequence[Column]
    gap: bool = False


class Verdict(Part, frozen=True):
    """The answer in one sentence, which a page shows first."""

    text: str
    colour: str = "default"
    gap: bool = True
    is_title: bool = False
    """Whether it is the title of a page, with a mark of success or failure."""


class Commands(Part, frozen=True):
    """Lines to paste into a shell; a long one continues on the next line after a backslash."""

    lines: Sequence[str]
    heading: str = "To paste"


class Chart(Part, frozen=True):
    """A drawing with characters."""

    draw: Callable[[int, bool], Iterator[str]]
    """Yields the lines for a width in characters; with True, only of ASCII characters."""


Document = Sequence[Heading | Text | Table | Columns | Verdict | Commands | Chart]


class HasDocument(Protocol):
    """What the writers for people need."""

    def document(self) -> Document:
        """Return the document."""


def report(
    *,
    title: str,
    facts: Sequence[str],
    tables: Sequence[Table],
    verdict: str,
    colour: str,
    sections: Sequence[tuple[str, Sequence[str]]],
    charts: Sequence[Chart] = (),
    commands: Sequence[str] = (),
) -> Document:
    """Return a document with the usual order of parts; ``sections`` are headings and lines."""
    return (
        Heading(title),
        Text(facts, style="dim", mark="-"),
        *tables,
        Verdict(verdict, colour),
        *(section(heading, lines) for heading, lines in sections),
        Commands(commands),
        *charts,
    )


def section(heading: str, lines: Sequence[str], *, only: Literal["", "page"] = "") -> Text:
    """Return a list below a heading, which may be empty."""
    return Text(lines, heading, mark="-", indent=2, gap=True, only=only)
