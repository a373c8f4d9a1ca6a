"""Text for the terminal, plain in a pipe or a file; numbers are never cut."""

import re
from collections.abc import Iterator

from rich.text import Text as RichText

from memfit.cli.render.document import (
    AnyPart,
    Chart,
    Columns,
    Commands,
    Document,
    HasDocument,
    Heading,
    Pair,
    Sliders,
    Table,
    Text,
    Verdict,
)
from memfit.cli.render.output import visible
from memfit.cli.render.page import Page, draw_columns, draw_table, open_page

# A word of a shell command: quoted parts and escaped characters may have spaces in them.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""")


def write(view: HasDocument, *, to_file: bool) -> str:
    """Return the view's document as text."""
    return to_terminal(view.document(), to_file=to_file)


def to_terminal(document: Document, *, to_file: bool) -> str:
    """Return a document as text with colours only for a terminal that supports them."""
    page = open_page(to_file=to_file)
    is_first = True
    for part in document:
        is_empty = isinstance(part, Text | Commands) and not part.lines
        if is_empty or part.only in ("page", "picture") or isinstance(part, Sliders):
            continue
        before = page.length
        if not is_first and _has_gap(part):
            page.console.print()
        _draw(page, part)
        if part.needs_room and page.lines > page.height:
            page.take_back(before)
            if part.otherwise:
                page.say(part.otherwise)
        is_first = False
    return page.text()


def _has_gap(part: AnyPart) -> bool:
    return part.gap if isinstance(part, Text | Table | Columns | Verdict) else True


def _draw(page: Page, part: AnyPart) -> None:
    match part:
        case Heading():
            _heading(page, part)
        case Text():
            _text(page, part)
        case Table():
            draw_table(page, part)
        case Columns():
            draw_columns(page, part)
        case Verdict():
            page.say(part.text, style=f"bold {part.colour}")
        case Commands():
            page.say(part.heading)
            for line in part.lines:
                for piece in continued(visible(line), page.console.width - 2):
                    page.console.print(f"  {piece}", soft_wrap=True)
        case Sliders():
            pass
        case _:
            _chart(page, part)


def continued(command: str, width: int) -> Iterator[str]:
    """Yield the lines of a shell command, broken between its words where it is too long."""
    line = ""
    for word in _WORD.findall(command):
        if line and len(line) + len(word) + 3 > width:
            yield f"{line} \\"
            line = "  "
        line += word if line in ("", "  ") else f" {word}"
    yield line


def _chart(page: Page, chart: Chart) -> None:
    from memfit.cli.render.plot import plot  # most answers have no chart

    for line in plot(chart, page.console.width, ascii_only=page.ascii_only):
        pieces = ((visible(str(piece)), getattr(piece, "colour", "")) for piece in line)
        page.console.print(RichText.assemble(*pieces), no_wrap=True, crop=True)


def _heading(page: Page, heading: Heading) -> None:
    is_one_line = len(heading.text) + len(heading.status) + 2 <= page.console.width
    end = ": " if is_one_line else ":\n"
    page.say(heading.text, style="bold", end=end if heading.status else "\n")
    if heading.status:
        page.say(heading.status, style=heading.colour)


def _text(page: Page, text: Text) -> None:
    if text.heading:
        page.say(text.heading)
    for number, line in enumerate(text.lines, 1):
        if isinstance(line, Pair):
            page.say(line.problem, indent=text.indent)
            page.say(line.remedy, indent=text.indent + 2)
            continue
        prefix = {"1.": f"{number} ", "!": "note: "}.get(text.mark, "")
        page.say(f"{prefix}{line}", style=text.style, indent=text.indent)
