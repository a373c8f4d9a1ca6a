"""A result as plain data: texts, tables and charts. Views make documents, writers format them.

No text in a document is escaped: each writer does that for its format.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.estimate import RunCall

VERDICT_WORDS = {
    "fits": "fits",
    "tight": "tight",
    "exceeds": "does not fit",
    "does_not_load": "does not load",
    "unknown": "unknown",
}
VERDICT_CELLS = {**VERDICT_WORDS, "exceeds": "no"}
"""In a table, where there is less room."""
VERDICT_COLOURS = {
    "fits": "green",
    "tight": "yellow",
    "does_not_load": "red",
    "exceeds": "red",
    "unknown": "default",
}


class Pair(Struct, frozen=True):
    """A problem and its remedy."""

    problem: str
    remedy: str


class Toned(Struct, frozen=True):
    """A text in a colour, which only repeats what the text says."""

    text: str
    colour: str

    def __str__(self) -> str:
        return self.text


Cell = str | int | bool | Toned
"""A text, an amount that is drawn as a bar, or whether a check passed."""


class DocumentPart(Struct, frozen=True, kw_only=True):
    """A part of a document."""

    only: Literal["", "terminal", "page", "text", "picture"] = ""
    """Where it is shown: on the terminal, on a page (Markdown, HTML), as text (terminal, Markdown),
    as a picture (HTML, SVG). Empty: everywhere that can show it."""
    needs_room: bool = False
    """Whether the terminal leaves it out when the screen is full."""
    otherwise: str = ""
    """A line that the terminal shows in place of a part that needs room."""


class Heading(DocumentPart, frozen=True):
    """The title of the document, or of a section."""

    text: str
    level: int = 2
    status: str = ""
    """A status after the text."""
    colour: str = ""
    """The colour of the status."""


class Text(DocumentPart, frozen=True):
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


class Table(DocumentPart, frozen=True):
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
    keys: int = 1
    """Columns that name a row, the first ones: each block on a narrow terminal repeats them."""

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


class Columns(DocumentPart, frozen=True):
    """Columns side by side; a narrow terminal shows them in blocks that repeat the fixed ones."""

    fixed: Sequence[Column]
    others: Sequence[Column]
    gap: bool = False


class Verdict(DocumentPart, frozen=True):
    """The answer in one sentence, which a page shows first."""

    text: str
    colour: str = "default"
    gap: bool = True
    is_title: bool = False
    """Whether it is the title of a page, with a mark of success or failure."""


class Commands(DocumentPart, frozen=True):
    """Lines to paste into a shell; a long one continues on the next line after a backslash."""

    lines: Sequence[str]
    heading: str = "To paste"


class Bar(Struct, frozen=True):
    """A bar: bytes of up to three kinds, and its limit in bytes."""

    label: str
    parts: Sequence[int]
    limit: int | None = None
    note: str = ""
    """After its size."""
    size: str = ""
    """In place of its bytes, where the parts are a share of the limit."""
    heading: str = ""
    """A line above it."""

    @property
    def is_over(self) -> bool:
        """Whether it is longer than its limit."""
        return self.limit is not None and sum(self.parts) > self.limit

    def size_text(self, units: Units) -> str:
        """Return its size in words."""
        return self.size or format_bytes(sum(self.parts), units)


class BarChart(DocumentPart, frozen=True):
    """Bars to one scale; a kind without a name is not in the legend."""

    title: str
    kinds: Sequence[str]
    bars: Sequence[Bar]
    units: Units
    limit: str = ""
    """What the limit is."""
    to_limit: bool = False
    """Whether the limit fills the width; a longer bar is cut there."""

    @property
    def whole(self) -> int:
        """The bytes that fill the width."""
        if self.to_limit:
            return max(1, *(bar.limit or sum(bar.parts) for bar in self.bars))
        return max(1, *(max(sum(bar.parts), bar.limit or 0) for bar in self.bars))


class Dot(Struct, frozen=True):
    """A point of a scatter: points with the same settings share a letter."""

    letter: str
    nbytes: int
    rate: float


class Scatter(DocumentPart, frozen=True):
    """Tokens per second upwards from zero, memory to the right from least to most."""

    title: str
    dots: Sequence[Dot]
    units: Units
    least: int
    most: int

    @property
    def highest(self) -> float:
        """The most tokens per second."""
        return max(dot.rate for dot in self.dots)


class RunChart(DocumentPart, frozen=True):
    """Memory over the calls of a run, and the budget."""

    run: Sequence[RunCall]
    budget: int | None
    units: Units

    @property
    def peak(self) -> int:
        """The most bytes in use."""
        return max(max(call.bytes) for call in self.run)

    @property
    def floor(self) -> int:
        """The least bytes in use, where the drawing starts."""
        return min(min(call.bytes) for call in self.run)

    @property
    def line(self) -> int | None:
        """The budget where it is drawn: far above the run it would leave no room for it."""
        span = 2 * (self.peak - self.floor)
        return self.budget if self.budget and self.budget - self.floor < span else None

    @property
    def top(self) -> int:
        """The bytes at the upper end of the drawing."""
        return max(self.peak, self.line or 0)

    @property
    def title(self) -> str:
        """What is drawn, with the call of the peak."""
        call = next(call for call in self.run if self.peak in call.bytes)
        size = format_bytes(self.peak, self.units)
        return f"Memory over the operations of a run: peak {size} in {phase_name(call)}"

    @property
    def limit(self) -> str:
        """The budget in words, empty without one."""
        if not self.budget:
            return ""
        above = "" if self.line else ", above all of it"
        return f"working set {format_limit(self.budget, self.units)}{above}"


def phase_name(call: RunCall) -> str:
    """The phase of a call in words."""
    return call.phase.replace("_", " ")


class HeatMap(DocumentPart, frozen=True):
    """A table with coloured cells; its first column is the label of a row."""

    table: Table
    note: str = ""
    """What the marks in the cells mean, for a drawing without the text around it."""

    @property
    def title(self) -> str:
        """What is drawn."""
        return self.table.title


Chart = BarChart | Scatter | RunChart | HeatMap


class Slider(Struct, frozen=True):
    """A setting with its values, and the one that it starts with."""

    label: str
    values: Sequence[str]
    start: int


class SliderPoint(Struct, frozen=True):
    """What one combination of the sliders needs."""

    verdict: str
    sentence: str
    share: int
    """Of the budget in percent; 0 where it is not known."""
    cells: Sequence[str]


class Sliders(DocumentPart, frozen=True):
    """Settings to change on a page, over points that were computed before."""

    title: str
    sliders: Sequence[Slider]
    headings: Sequence[str]
    """Of the cells of a point."""
    points: Sequence[SliderPoint]
    """All combinations, the last slider changing fastest."""


AnyPart = Heading | Text | Table | Columns | Verdict | Commands | Chart | Sliders
Document = Sequence[AnyPart]


def verdict_first(document: Document) -> Document:
    """Return the parts of a page: the title, the verdict, and what follows from it."""
    titles = [part for part in document[:1] if isinstance(part, Heading) and part.level == 2]
    verdicts = [part for part in document if isinstance(part, Verdict)]
    others = [part for part in document if not (part in titles or isinstance(part, Verdict))]
    return (*titles, *verdicts, *others)


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


class Annotation(NamedTuple):
    """A message at a line of a file."""

    level: Literal["error", "warning"]
    file: str
    line: int
    title: str
    text: str


class Case(NamedTuple):
    """A test case; ``outcome`` is empty when it passed."""

    name: str
    file: str
    line: int
    outcome: Literal["", "failure", "error", "skipped"] = ""
    message: str = ""
    text: str = ""


class Suite(NamedTuple):
    """Test cases with a common name."""

    name: str
    cases: Sequence[Case]
