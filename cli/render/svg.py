"""Draw charts as SVG: no script, no reference, each text escaped.

Colours follow the reader's light or dark setting, and only repeat what a word or a place says.
"""

import html
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memfit.cli.render.document import (
    VERDICT_COLOURS,
    VERDICT_WORDS,
    Bar,
    BarChart,
    Chart,
    HeatMap,
    RunChart,
    Scatter,
    Toned,
    phase_name,
)
from memfit.cli.render.output import visible
from memfit.cli.render.plot import OVER, axis_ends, shortened
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.units import format_bytes

CLASSES = {colour: verdict for verdict, colour in VERDICT_COLOURS.items()}
"""The class of a colour of the document."""
# Of each class: a property, its colour on a light page and on a dark one. Texts have a contrast of
# at least 4.5 with what is behind them, kinds of bytes 3 with the page and the next kind.
_PALETTE = {
    "paper": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1b1f24", "#e6edf3"),
    "dim": ("fill", "#57606a", "#9da7b1"),
    "k": ("stroke", "#ffffff", "#0d1117"),
    "k0": ("fill", "#123f75", "#8cc2ff"),
    "k1": ("fill", "#cf7d00", "#8a5600"),
    "k2": ("fill", "#3d434c", "#d0d7de"),
    "over": ("fill", "#cf222e", "#f85149"),
    "bad": ("fill", "#a40e26", "#ff7b72"),
    "limit": ("stroke", "#1b1f24", "#e6edf3"),
    "rule": ("stroke", "#8c959f", "#6e7681"),
    "fits": ("fill", "#d7f0dd", "#12361f"),
    "tight": ("fill", "#fdecc0", "#3f2e00"),
    "exceeds": ("fill", "#fbd9d6", "#4c1519"),
    "unknown": ("fill", "#eaeef2", "#21262d"),
}
_FONT = "font:13px system-ui,-apple-system,'Segoe UI',sans-serif"
_LINE = 19  # pixels from one line of text to the next
_CHARACTER = 7  # pixels that a character takes, or less
_BAR = 14
_GAP = 26  # between two charts
_PLOT = 180


def style() -> str:
    """Return the style sheet of the drawings."""
    rules = [
        [f".memfit .{name}{{{kind}:{tones[number]}}}" for name, (kind, *tones) in _PALETTE.items()]
        for number in (0, 1)
    ]
    return (
        f".memfit text{{{_FONT}}}.memfit .title{{font-weight:600}}.memfit .small{{font-size:12px}}"
        ".memfit .over{fill-opacity:.65}.memfit .limit{stroke-width:2}.memfit .k{stroke-width:1}"
        f".memfit .dot{{fill-opacity:.35}}{''.join(rules[0])}"
        f"@media (prefers-color-scheme:dark){{{''.join(rules[1])}}}"
    )


def palette() -> str:
    """Return the colours as variables of a style sheet, for what is around the drawings."""
    light, dark = (
        "".join(f"--{name}:{tones[number]};" for name, (_, *tones) in _PALETTE.items())
        for number in (0, 1)
    )
    return f".memfit{{{light}}}@media (prefers-color-scheme:dark){{.memfit{{{dark}}}}}"


def image(charts: Sequence[Chart], caption: str, width: int = 720) -> str:
    """Return a file with the charts below each other and a caption."""
    margin = 16
    inner = width - 2 * margin
    height, lines = _titled(caption, inner)
    parts = [f'<g transform="translate({margin} {margin})">{"".join(lines)}</g>']
    top = margin + height + _GAP // 2
    for chart in charts:
        drawing = _draw(chart, inner)
        parts.append(f'<g transform="translate({margin} {top})">{"".join(drawing.parts)}</g>')
        top += drawing.height + _GAP
    height = top - _GAP + margin
    names = ". ".join((caption.removesuffix("."), *(_described(chart) for chart in charts)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="memfit" role="img" width="{width}"'
        f' height="{height}" viewBox="0 0 {width} {height}"><title>{escaped(names)}</title>'
        f'<style>{style()}</style><rect class="paper" width="{width}" height="{height}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def figure(chart: Chart, width: int = 420) -> str:
    """Return a drawing for a page that has the style sheet; a figure around it has its name."""
    drawing = _draw(chart, width)
    return (
        f'<svg role="img" viewBox="0 0 {width} {drawing.height}"'
        f' aria-label="{escaped(_described(chart))}">{"".join(drawing.parts)}</svg>'
    )


def escaped(text: str) -> str:
    """Return a text that HTML and XML show as it is, also in an attribute.

    >>> escaped('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return html.escape(visible(text))


class _Drawing(NamedTuple):
    height: int
    parts: list[str]


def _draw(chart: Chart, width: int) -> _Drawing:
    match chart:
        case BarChart():
            return _bars(chart, width)
        case Scatter():
            return _scatter(chart, width)
        case RunChart():
            return _run(chart, width)
        case HeatMap():
            return _heat(chart, width)
        case _:
            assert_never(chart)


def _described(chart: Chart) -> str:
    """What a reader without the picture has to know of it."""
    match chart:
        case BarChart():
            over = sum(bar.is_over for bar in chart.bars)
            beyond = f"; {over} of {len(chart.bars)} bars exceed the limit" if over else ""
            return f"{chart.title}{f', {chart.limit}' if chart.limit else ''}{beyond}"
        case RunChart():
            return f"{chart.title}{f'; {chart.limit}' if chart.limit else ''}"
        case _:
            return chart.title


def _text(x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> str:
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}"{side}>{escaped(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{max(width, 0):g}" height="{height:g}" class="{kind}"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{kind}"/>'


def _cut(text: str, width: float) -> str:
    return shortened(visible(text), max(1, int(width // _CHARACTER)))


def _titled(title: str, width: int) -> _Drawing:
    lines = textwrap.wrap(visible(title), width // (_CHARACTER + 1)) or [""]
    texts = [_text(0, 14 + _LINE * row, line, "ink title") for row, line in enumerate(lines)]
    return _Drawing(_LINE * len(lines), texts)


class _Entry(NamedTuple):
    """A sample of a class, and what it means."""

    kind: str
    text: str


def _legend(entries: Sequence[_Entry], top: int, width: int) -> _Drawing:
    """The entries from left to right, in as many lines as they take."""
    parts: list[str] = []
    x = y = 0
    for kind, text in entries:
        taken = 18 + _CHARACTER * len(text)
        if x and x + taken > width:
            x, y = 0, y + _LINE
        middle = top + y + 8
        if kind == "limit":
            parts.append(_line(x + 6, middle - 6, x + 6, middle + 7, kind))
        else:
            parts.append(_rect(x, middle - 6, 12, 12, kind))
        parts.append(_text(x + 18, middle + 5, text, "dim"))
        x += taken + 14
    return _Drawing(y + _LINE + 5, parts) if entries else _Drawing(0, [])


def _bars(chart: BarChart, width: int) -> _Drawing:
    height, parts = _titled(chart.title, width)
    kinds = [_Entry(f"k{place}", kind) for place, kind in enumerate(chart.kinds) if kind]
    limits = [_Entry("limit", chart.limit)] if chart.limit else []
    over = [_Entry("over", "over the limit")] if any(bar.is_over for bar in chart.bars) else []
    legend = _legend([*kinds, *limits, *over], height, width)
    parts += legend.parts
    top = height + legend.height
    for bar in chart.bars:
        if bar.heading:
            parts.append(_text(0, top + 14, _cut(bar.heading, width), "dim title"))
            top += _LINE
        parts += _labelled(chart, bar, top, width)
        parts += _stack(chart, bar, top + _LINE, width)
        top += _LINE + _BAR + 7
    return _Drawing(top, parts)


def _labelled(chart: BarChart, bar: Bar, top: int, width: int) -> Iterator[str]:
    size = " ".join(filter(None, (bar.size_text(chart.units), bar.note)))
    word = f"{size}, {OVER}" if bar.is_over else size
    room = width - _CHARACTER * (len(word) + 2)
    yield _text(0, top + 14, _cut(bar.label, room))
    yield _text(width, top + 14, word, "bad" if bar.is_over else "ink", "end")


def _stack(chart: BarChart, bar: Bar, top: int, width: int) -> Iterator[str]:
    scale, end = (width - 1) / chart.whole, 0
    for place, nbytes in enumerate(bar.parts):
        shown = min(nbytes, max(0, chart.whole - end))
        yield _rect(end * scale, top, shown * scale, _BAR, f"k k{place}") if shown else ""
        end += nbytes
    if bar.limit is None:
        return
    at, end = bar.limit * scale, min(end, chart.whole)
    if bar.is_over and end > bar.limit:
        yield _rect(at, top, end * scale - at, _BAR, "over")
    yield _line(at, top - 3, at, top + _BAR + 3, "limit")


def _scatter(chart: Scatter, width: int) -> _Drawing:
    height, parts = _titled(chart.title, width)
    top, span = height + 12, max(chart.most - chart.least, 1)
    parts.append(_text(0, top + 4, f"{chart.highest:.1f}", "dim"))
    left = _CHARACTER * (len(f"{chart.highest:.1f}") + 1)
    parts += [_text(left - 8, top + _PLOT, "0", "dim", "end"), _axes(left, top, width)]
    for dot in chart.dots:
        x = left + 12 + (dot.nbytes - chart.least) / span * (width - left - 24)
        y = top + _PLOT - dot.rate / chart.highest * _PLOT
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" class="k0 dot"/>')
        parts.append(_text(x, y + 4, dot.letter, "ink", "middle"))
    low, high = axis_ends(chart.least, chart.most, chart.units)
    bottom = top + _PLOT + 17
    parts += [_text(left, bottom, low, "dim"), _text(width, bottom, high, "dim", "end")]
    return _Drawing(bottom + 6, parts)


def _axes(left: int, top: int, width: int) -> str:
    d = f"M{left} {top}V{top + _PLOT}H{width}"
    return f'<path d="{d}" class="rule" fill="none"/>'


def _run(chart: RunChart, width: int) -> _Drawing:
    height, parts = _titled(chart.title, width)
    limits = [_Entry("limit", chart.limit)] if chart.line else []
    legend = _legend([_Entry("k0", "in use"), *limits], height, width)
    parts += legend.parts
    if chart.limit and not chart.line:
        parts.append(_text(width, height + 13, _cut(chart.limit, width - 80), "dim", "end"))
    top = height + legend.height + 4
    names = [format_bytes(value, chart.units) for value in (chart.top, chart.floor)]
    left = _CHARACTER * max(map(len, names)) + 8
    parts += [_text(0, top + 9, names[0], "dim"), _text(0, top + _PLOT, names[1], "dim")]
    scale = _PLOT / max(chart.top - chart.floor, 1)
    each = (width - left) / len(chart.run)
    bottom = top + _PLOT
    for number, call in enumerate(chart.run, 1):
        start = left + each * (number - 1)
        step = each / len(call.bytes)
        path = "".join(
            f"V{bottom - (value - chart.floor) * scale:.1f}H{start + step * place:.1f}"
            for place, value in enumerate(call.bytes, 1)
        )
        parts.append(f'<path d="M{start:.1f} {bottom}{path}V{bottom}Z" class="k0"/>')
        parts.append(_line(start, top, start, bottom, "rule"))
        parts.append(_text(start + 3, bottom + 15, str(number), "dim"))
        label = f"{number} {phase_name(call)}, {call.tokens} at {call.position}"
        parts.append(_text(left, bottom + 15 + _LINE * number, label, "dim"))
    if chart.line:
        y = bottom - (chart.line - chart.floor) * scale
        parts.append(_line(left, y, width, y, "limit"))
    parts.append(_axes(left, top, width))
    return _Drawing(bottom + 22 + _LINE * len(chart.run), parts)


_CELL = 36


def _heat(chart: HeatMap, width: int) -> _Drawing:
    table = chart.table
    height, parts = _titled(table.title, width)
    words = [_Entry(verdict, VERDICT_WORDS[verdict]) for verdict in ("fits", "tight", "exceeds")]
    legend = _legend(words, height, width)
    parts += legend.parts
    places = [n for n in range(1, len(table.headings)) if isinstance(table.rows[0][n], Toned)]
    longest = max(len(visible(str(row[0]))) for row in table.rows)
    left = min(_CHARACTER * (longest + 1), width * 2 // 5)
    cell_width = (width - left) / len(places)
    top = height + legend.height
    for column, place in enumerate(places):
        x = left + cell_width * (column + 0.5)
        text = _cut(table.headings[place], cell_width)
        parts.append(_text(x, top + 13, text, "dim small", "middle"))
    top += _LINE
    for row in table.rows:
        parts.append(_text(0, top + _CELL / 2 + 4, _cut(str(row[0]), left)))
        for column, place in enumerate(places):
            parts += _heat_cell(row[place], left + cell_width * column, top, cell_width)
        top += _CELL
    for line in textwrap.wrap(visible(chart.note), width // _CHARACTER):
        top += _LINE
        parts.append(_text(0, top - 2, line, "dim"))
    return _Drawing(top, parts)


def _heat_cell(cell: object, x: float, top: int, cell_width: float) -> Iterator[str]:
    verdict = CLASSES.get(getattr(cell, "colour", ""), "unknown")
    yield _rect(x + 1, top + 1, cell_width - 2, _CELL - 2, verdict)
    number, _, word = str(cell).strip(" ").partition(" ")
    if verdict == "fits" and number != "fits":
        word = verdict  # a table says it by the missing word
    lines = [number, word] if word else [number]
    first = top + (_CELL / 2 + 4 if len(lines) == 1 else 15)
    for place, line in enumerate(lines):
        text = _cut(line, cell_width)
        yield _text(x + cell_width / 2, first + 15 * place, text, "ink small", "middle")
