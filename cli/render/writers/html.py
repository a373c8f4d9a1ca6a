"""HTML: one file without requests, for a screen of any size, a screen reader and a keyboard.

Every text is escaped. The page's policy allows one style sheet and, with sliders, one script, both
by their hashes, and nothing else.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from memfit.cli.render.document import (
    VERDICT_WORDS,
    AnyPart,
    BarChart,
    Cell,
    Chart,
    Columns,
    Commands,
    Document,
    HasDocument,
    Heading,
    HeatMap,
    Pair,
    RunChart,
    Sliders,
    Table,
    Text,
    Toned,
    Verdict,
    phase_name,
    verdict_first,
)
from memfit.cli.render.output import visible
from memfit.cli.render.svg import CLASSES, escaped, figure
from memfit.cli.render.writers.html_assets import SCRIPT, STYLE
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import format_bytes
from memfit.estimators.base.version import __version__

LARGEST = 300_000
"""Bytes of a page."""
_ROWS = (2000, 500, 100, 20)  # of a table, chart or list; the first with a page small enough
_SIGNS = {"fits": "✓", "tight": "!", "exceeds": "✗", "unknown": "?"}


def write(view: HasDocument, *, to_file: bool) -> str:
    """Return the view's document as a page."""
    return to_page(view.document())


def to_page(document: Document) -> str:
    """Return a document as a page of at most 300 KB; what is long says what it leaves out.

    Raises:
        InputError: when it is larger without long tables too.
    """
    for most in _ROWS:
        page = _page(document, most)
        if len(page.encode()) <= LARGEST:
            return page
    raise InputError("the page is larger than 300 KB: ask about fewer models, or use --format json")


def to_fragment(document: Document) -> str:
    """Return a document as an element with its style sheet, without sliders and script."""
    head, body = _divided([part for part in document if not isinstance(part, Sliders)])
    shown = f"{_header(head)}{_body(body, _ROWS[-1])}"
    return f'<style>{STYLE}</style><div class="memfit">{shown}</div>'


def _page(document: Document, most: int) -> str:
    head, body = _divided(document)
    has_sliders = any(isinstance(part, Sliders) for part in body)
    title = next((part.text for part in head), "memfit")
    script = f"<script>{SCRIPT}</script>" if has_sliders else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(has_sliders)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)} - memfit</title><style>{STYLE}</style></head>"
        f'<body class="memfit"><header>{_header(head)}</header><main>{_body(body, most)}</main>'
        f'<footer class="dim">memfit {__version__}</footer>{script}</body></html>\n'
    )


def _policy(has_script: bool) -> str:
    script = f"; script-src '{_hash(SCRIPT)}'" if has_script else ""
    own = f"style-src '{_hash(STYLE)}'{script}"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _divided(document: Document) -> tuple[list[Heading | Verdict], list[AnyPart]]:
    """The title and the verdicts, and what follows."""
    shown = [part for part in document if part.only not in ("terminal", "text")]
    # A table in colours is a heat map already.
    tables = [id(part) for part in shown if isinstance(part, Table)]
    shown = [p for p in shown if not (isinstance(p, HeatMap) and id(p.table) in tables)]
    parts = verdict_first(shown)
    head = [
        part
        for place, part in enumerate(parts)
        if isinstance(part, Verdict) or (place == 0 and isinstance(part, Heading))
    ]
    return head, list(parts[len(head) :])


def _header(head: Sequence[Heading | Verdict]) -> str:
    """The first is the title of the page."""
    parts: list[str] = []
    for part in head:
        if isinstance(part, Heading):
            parts.append(f"<h1>{escaped(part.text)}</h1>")
            continue
        tag = "p" if parts else "h1"
        verdict = CLASSES.get(part.colour, "unknown")
        sign = f'<span aria-hidden="true">{_SIGNS[verdict]} </span>'
        parts.append(f'<{tag} class="verdict {verdict}">{sign}{escaped(part.text)}</{tag}>')
    return "".join(parts)


def _body(parts: Sequence[AnyPart], most: int) -> str:
    return "".join(piece for part in parts for piece in _part(part, most))


def _part(part: AnyPart, most: int) -> Iterator[str]:
    match part:
        case Heading():
            status = f": {part.status}" if part.status else ""
            yield f"<h2>{escaped(part.text + status)}</h2>"
        case Text():
            yield from _text(part, most)
        case Table():
            yield from _table(_grid(part), most)
        case Columns():
            yield from _table(_side_by_side(part), most)
        case Verdict():
            yield f"<p><strong>{escaped(part.text)}</strong></p>"
        case Commands():
            if part.lines:
                yield f"<h2>{escaped(part.heading)}</h2>"
                yield from (f"<pre><code>{escaped(line)}</code></pre>" for line in part.lines)
        case Sliders():
            yield from _sliders(part)
        case HeatMap():
            yield from _table(_grid(part.table), most)
        case _:
            yield from _chart(part, most)


def _text(text: Text, most: int) -> Iterator[str]:
    if not text.lines:
        return
    if text.heading:
        yield f"<h2>{escaped(text.heading)}</h2>"
    lines = [_line(line, is_strong=text.strong) for line in text.lines[:most]]
    if text.mark:
        tag = "ol" if text.mark == "1." else "ul"
        start = "<strong>Note:</strong> " if text.mark == "!" else ""
        yield f"<{tag}>{''.join(f'<li>{start}{line}</li>' for line in lines)}</{tag}>"
    else:
        kind = ' class="dim"' if text.style == "dim" else ""
        yield from (f"<p{kind}>{line}</p>" for line in lines)
    yield from _left_out(len(text.lines), most, "lines")


def _left_out(count: int, most: int, what: str) -> Iterator[str]:
    if count > most:
        text = f"{count - most} more {what} are left out to keep the page small; --json has them."
        yield f"<p>{text}</p>"


def _line(line: str | Pair, *, is_strong: bool) -> str:
    if isinstance(line, Pair):
        return f"<strong>{escaped(line.problem)}</strong><br>{escaped(line.remedy)}"
    return f"<strong>{escaped(line)}</strong>" if is_strong else escaped(line)


class _Grid(NamedTuple):
    """A table with headings over one or more columns."""

    title: str
    headings: Sequence[tuple[str, int]]
    rights: Sequence[bool]
    """Of each column: whether its cells are aligned right."""
    rows: Sequence[Sequence[Cell]]
    has_total: bool = False
    is_stacked: bool = False
    """Whether a phone shows the cells of a row below each other, each with its heading."""


def _grid(table: Table) -> _Grid:
    headings = [(heading, 1) for heading in table.headings]
    rights = [table.aligned(place) == "r" for place in range(len(headings))]
    verdicts = max((sum(isinstance(cell, Toned) for cell in row) for row in table.rows), default=0)
    # A matrix of verdicts is read along its columns too.
    is_stacked = len(headings) > _STACKED and verdicts < 2
    return _Grid(table.title, headings, rights, table.rows, table.has_total, is_stacked)


def _side_by_side(columns: Columns) -> _Grid:
    shown = [*columns.fixed, *columns.others]
    widths = [max(map(len, column.cells), default=1) for column in shown]
    rights = [
        not column.is_left
        for column, width in zip(shown, widths, strict=True)
        for _ in range(width)
    ]
    rows = [
        [part for cell in cells for part in cell]
        for cells in zip(*(column.cells for column in shown), strict=True)
    ]
    headings = [(column.heading, width) for column, width in zip(shown, widths, strict=True)]
    return _Grid("", headings, rights, rows)


def _table(grid: _Grid, most: int) -> Iterator[str]:
    named = [heading for heading, _ in grid.headings if heading]
    title = escaped(grid.title or ", ".join(named))
    caption = "<caption>" if grid.title else '<caption class="hidden">'
    kind = ' class="stack"' if grid.is_stacked else ""
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table{kind}>'
    yield f"{caption}{title}</caption><thead><tr>{''.join(_headings(grid))}</tr></thead><tbody>"
    for number, row in enumerate(grid.rows[:most], 1):
        is_total = grid.has_total and number == len(grid.rows)
        labels = [name for name, _ in grid.headings] if grid.is_stacked else [""] * len(row)
        first, *others = map(_cell, row, grid.rights, labels)
        start = '<tr class="total">' if is_total else "<tr>"
        name = first.replace("<td", '<th scope="row"', 1).replace("</td>", "</th>")
        yield f"{start}{name}{''.join(others)}</tr>"
    yield "</tbody></table></div>"
    yield from _left_out(len(grid.rows), most, "rows")


def _headings(grid: _Grid) -> Iterator[str]:
    place = 0
    for heading, width in grid.headings:
        span = f' colspan="{width}"' if width > 1 else ""
        kind = ' class="r"' if grid.rights[place] and width == 1 else ""
        tag = f'th scope="{"colgroup" if width > 1 else "col"}"' if heading else "td"
        yield f"<{tag}{span}{kind}>{escaped(heading)}</{tag[:2]}>"
        place += width


def _cell(cell: Cell, is_right: bool, label: str) -> str:
    """A cell; ``label`` is what a phone shows before it."""
    named = f' data-label="{escaped(label)}"' if label else ""
    if isinstance(cell, bool):
        verdict = "fits" if cell else "exceeds"
        return f'<td class="{verdict}">{_SIGNS[verdict]} {"passed" if cell else "broken"}</td>'
    text = str(cell).strip(" ")
    if isinstance(cell, Toned):
        verdict = CLASSES.get(cell.colour, "unknown")
        is_said = verdict != "fits" or "fits" in text
        word = "" if is_said else f' <span class="hidden">{VERDICT_WORDS[verdict]}</span>'
        return f'<td class="heat {verdict}"{named}>{escaped(text)}{word}</td>'
    kind = "r" if is_right else "name" if len(text) > _LONG else ""
    of_kind = f' class="{kind}"' if kind else ""
    return f"<td{of_kind}{named}>{escaped(text)}</td>"


_STACKED = 3  # columns that a phone has room for
_LONG = 16  # characters of a cell that may break anywhere


def _chart(chart: Chart, most: int) -> Iterator[str]:
    bars = len(chart.bars) if isinstance(chart, BarChart) else 0
    shown = replace(chart, bars=chart.bars[:most]) if isinstance(chart, BarChart) else chart
    yield f"<figure>{figure(shown)}</figure>"
    yield from _left_out(bars, most, "bars")
    if table := _figures(chart):
        yield "<details><summary>Figures of this chart</summary>"
        yield from _table(table, most)
        yield "</details>"


def _figures(chart: Chart) -> _Grid | None:
    """The figures of a chart for those who do not see it."""
    rows: list[list[str]]
    if isinstance(chart, BarChart):
        kinds = [(place, kind) for place, kind in enumerate(chart.kinds) if kind]
        if len(kinds) == 1:  # that is all of it
            kinds = []
        rows = [
            [
                " ".join(filter(None, (bar.heading, bar.label))),
                *(_part_of(bar.parts, place, chart) for place, _ in kinds),
                bar.size_text(chart.units),
            ]
            for bar in chart.bars
        ]
        headings = ["", *(kind for _, kind in kinds), "in all"]
    elif isinstance(chart, RunChart):
        rows = [
            [
                phase_name(call),
                str(call.tokens),
                str(call.position),
                format_bytes(max(call.bytes), chart.units),
            ]
            for call in chart.run
        ]
        headings = ["Call", "Tokens", "At", "Most in use"]
    else:
        return None
    rights = [False, *(True for _ in headings[1:])]
    return _Grid(chart.title, [(heading, 1) for heading in headings], rights, rows)


def _part_of(parts: Sequence[int], place: int, chart: BarChart) -> str:
    return format_bytes(parts[place] if place < len(parts) else 0, chart.units)


def _sliders(part: Sliders) -> Iterator[str]:
    """Hidden until the script runs; the texts are data that no browser executes."""
    yield "<noscript><p>With JavaScript, settings can be changed here.</p></noscript>"
    yield '<section id="sliders" aria-labelledby="sliders-title" hidden>'
    yield f'<h2 id="sliders-title">{escaped(part.title)}</h2><div class="sliders">'
    for number, slider in enumerate(part.sliders):
        name, last = f"slider-{number}", len(slider.values) - 1
        value = escaped(slider.values[slider.start])
        yield (
            f'<div><label for="{name}">{escaped(slider.label)}</label>'
            f'<input id="{name}" type="range" min="0" max="{last}" step="1" value="{slider.start}"'
            f' aria-valuetext="{value}">'
            f'<span id="{name}-value" aria-hidden="true">{value}</span></div>'
        )
    yield '</div><p id="answer" class="verdict" role="status"></p>'
    if any(point.share for point in part.points):
        yield '<meter aria-label="Share of the budget in percent" min="0" max="100" high="99.9"'
        yield ' low="90" optimum="50"></meter>'
    yield '<div class="scroll"><table><caption class="hidden">What it is made of</caption><tbody>'
    yield from (
        f'<tr><th scope="row">{escaped(name)}</th><td class="r"></td></tr>'
        for name in part.headings
    )
    data = json.dumps(_data(part), separators=(",", ":"))
    yield '</tbody></table></div></section><script type="application/json" id="points">'
    yield data.translate({ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&"}) + "</script>"


def _data(part: Sliders) -> dict[str, object]:
    """The points; each text is there once."""
    texts: dict[str, int] = {}

    def numbered(strings: Iterable[str]) -> list[int]:
        return [texts.setdefault(text, len(texts)) for text in strings]

    verdicts = list(_SIGNS)
    points = [
        [verdicts.index(point.verdict), point.share, *numbered((point.sentence, *point.cells))]
        for point in part.points
    ]
    values = [numbered(slider.values) for slider in part.sliders]
    shown = [visible(text) for text in texts]
    return {"values": values, "verdicts": verdicts, "points": points, "texts": shown}
