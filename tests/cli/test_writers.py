"""Every writer makes hostile texts harmless in its format."""

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest
import yaml
from msgspec import Struct

from memfit.cli.render.document import (
    Annotation,
    Bar,
    BarChart,
    Case,
    Chart,
    Column,
    Columns,
    Commands,
    Document,
    Dot,
    Heading,
    HeatMap,
    Pair,
    Scatter,
    Suite,
    Table,
    Text,
    Toned,
    Verdict,
)
from memfit.cli.render.output import Format, rendered, visible
from memfit.estimators.base.units import Units
from memfit.estimators.results.result import json_text

HOSTILE = (
    "a|b",
    "<script>",
    "[text](link)",
    "`code`",
    "*stress*",
    "_name_",
    "\\",
    "@someone",
    "```",
    "::error::x",
    "##[error]x",
    "100%",
    "two\nlines",
    "one\r",
    "\x1b[31mred",
    "\x07bell",
    "\u202eright to left",
    "\u2066isolated",
    "&amp;",
    "\x00null",
    "\ud800",
    "[bold]markup[/bold]",
    ":smile:",
)


class Said(Struct):
    text: str

    def to_json(self) -> str:
        return json_text(self)


class View:
    """A view with one text at every place."""

    def __init__(self, text: str) -> None:
        self.text = text

    def document(self) -> Document:
        text = self.text
        return (
            Heading(text, status=text),
            Text([text, Pair(text, text)], heading=text, mark="-", gap=True),
            Text([text], mark="!"),
            Text([text], strong=True),
            Table((text, text), [(text, text)], title=text),
            Columns([Column(text, [[text]], is_left=True, page_headings=[text])],
                    [Column(text, [[text, text]], page_headings=[text])]),
            Verdict(text),
            Commands([text]),
            *charts(text),
        )  # fmt: skip

    @property
    def result(self) -> "Said":
        return Said(self.text)

    def rows(self) -> Iterator[tuple[str, None]]:
        yield (self.text, None)

    def annotations(self) -> Iterator[Annotation | str]:
        yield Annotation("error", self.text, 1, self.text, self.text)
        yield self.text

    def suites(self) -> tuple[str, list[Suite]]:
        text = self.text
        cases = [Case(text, text, 1), Case(text, text, 2, "failure", text, text)]
        return text, [Suite(text, cases)]


def charts(text: str) -> tuple[Chart, ...]:
    """Return charts with a text at every place."""
    bars = [Bar(text, (1, 2, 3), 4, note=text, heading=text)]
    table = Table((text, text), [(text, Toned(text, "red"))], title=text)
    return (
        BarChart(title=text, kinds=(text,), bars=bars, units=Units.GB),
        BarChart(title=text, kinds=(), bars=bars, units=Units.GB, limit=text),
        Scatter(title=text, dots=[Dot("a", 1, 1.0)], units=Units.GB, least=1, most=1),
        HeatMap(table=table),
    )


def written(text: str, form: Format) -> str:
    return rendered(View(text), form, to_file=True)


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_text_for_people_has_no_control_characters_and_adds_no_line(form: Format) -> None:
    for text in HOSTILE:
        shown, plain = written(text, form), written("x" * len(ascii(text)), form)
        assert shown.replace("\n", "").replace("\ufe0f", "").isprintable(), ascii(text)
        assert text == "```" or shown.count("\n") == plain.count("\n"), ascii(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", r"a\|b"),
        ("<b>", r"\<b>"),
        ("[a](b)", r"\[a](b)"),
        ("`a`", r"\`a\`"),
        ("*a*", r"\*a\*"),
        ("_a_", r"\_a\_"),
        ("@name", "@&#8203;name"),
        ("org/name@main", "org/name@main"),
        ("a\u202eb", r"a\\u202eb"),
    ],
)
def test_markdown_shows_marks_as_they_are(text: str, shown: str) -> None:
    before_fences = written(text, "markdown").split("```")[0]
    places = written("plain", "markdown").split("```")[0].count("plain")
    assert before_fences.count(shown) == places
    assert text == shown or text not in before_fences.replace(shown, "")


def test_a_fence_of_markdown_is_longer_than_backticks_in_it() -> None:
    lines = written("```", "markdown").splitlines()
    fences = [line for line in lines if line.startswith("````")]
    assert fences == ["````sh", "````", *["````text", "````"] * len(charts("```"))]


def test_an_annotation_is_one_command_and_a_line_of_the_log_is_none() -> None:
    for text in HOSTILE:
        first, second = written(text, "github").removesuffix("\n").split("\n")
        assert first.startswith("::error file="), ascii(text)
        properties = first.removeprefix("::error ").split("::")[0]
        assert [each.split("=")[0] for each in properties.split(",")] == ["file", "line", "title"]
        assert not second.lstrip().startswith("::"), ascii(text)
        assert "\r" not in first + second, ascii(text)


@pytest.mark.parametrize("form", ["table", "markdown", "github", "junit", "json"])
def test_no_format_has_a_command_of_the_older_form(form: Format) -> None:
    assert "##[" not in written("##[stop-commands]x", form)


def test_junit_is_xml_that_says_the_text() -> None:
    for text in HOSTILE:
        root = ElementTree.fromstring(written(text, "junit"))
        failure = next(root.iter("failure"))
        assert failure.get("message") == visible(text)
        assert text == "##[error]x" or visible(text) == text or not text.isprintable()
        assert root.get("failures") == "1"


def test_data_keeps_every_text() -> None:
    for text in set(HOSTILE) - {"\ud800"}:
        assert json.loads(written(text, "json")) == {"text": text}
        assert yaml.safe_load(written(text, "yaml")) == {"text": text}
        if text not in ("one\r", "\x00null"):
            (row,) = csv.reader(io.StringIO(written(text, "csv"), newline=""))
            assert row == [text, ""]


class OneTable(View):
    """A view of one table; its rows have two names."""

    def document(self) -> Document:
        headings = ("Tokens", "Bits", "Peak", "Planned")
        return (Table(headings, [("256", "8", self.text, self.text)], keys=2),)


@pytest.mark.parametrize(("digits", "names"), [(30, "Tokens Bits"), (48, "Tokens")])
def test_blocks_of_a_table_repeat_what_names_a_row(
    digits: int, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    drawn = rendered(OneTable(digits * "1"), "table", to_file=False)
    assert f"{names} Planned" in [" ".join(line.split()) for line in drawn.splitlines()]
