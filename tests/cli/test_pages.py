"""HTML and SVG: well formed, without requests, every text escaped, written by every command."""

import base64
import hashlib
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from math import prod
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from memfit.cli.render.document import Bar, BarChart, Document, Heading, Table, Text, Verdict
from memfit.cli.render.output import visible
from memfit.cli.render.svg import palette
from memfit.cli.render.writers.html import LARGEST, to_fragment, to_page
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.explore import explore
from memfit.estimators.sizing.opening import with_weight_bits
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line
from tests.cli.test_first_screen import SAMPLES
from tests.cli.test_writers import HOSTILE, View, written
from tests.models import QWEN3_4B, write_config
from tests.selection import quick

ROOT = SAMPLES.parent
SMALL = str(SAMPLES / "qwen3-4b-4bit.yaml")
LARGE = str(SAMPLES / "qwen3-8b-4bit.yaml")
TRACED = ROOT / "docs" / "examples" / "tiny-qwen3"
COMMANDS = {
    "estimate": f"estimate {SMALL} --memory 8GB --context 32k",
    "no-device": f"estimate {SMALL}",
    "compare": f"compare {SMALL} {LARGE} --memory 8GB --matrix context=4k,32k",
    "runtimes": f"compare {SMALL} --runtimes all --memory 16GB",
    "fits": "fits --memory 8GB",
    "context": f"plan context {SMALL} --memory 16GB",
    "server": f"plan server {SMALL} --memory 16GB --context 1k --max-tokens 8 --clients 2"
    " --prompt-concurrency 1 --decode-concurrency 2",
    "wired": f"plan wired {SAMPLES}/plans/wired-server.yaml",
    "growth": f"plan growth {SMALL} --memory 16GB --turns 3 --turn-tokens 2k",
    "experts": f"plan experts {SAMPLES}/qwen3-30b-a3b-4bit.yaml --memory 16GB",
    "offload": f"plan offload {SMALL} --memory 16GB",
    "static": f"plan static {TRACED}.json --trace {TRACED}.trace.json --context 2k",
}
REQUEST = "plan request --used 5000 --requested 5000 --capacity 8k"
VOID = {"meta", "input", "br", "rect", "path", "circle"}


class Page(HTMLParser):
    """Reads a page; fails at a tag that is not closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inside.setdefault(self.open[-1], []).append(data)

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy(page: Page) -> str:
    (found,) = (each for each in page.every("meta") if "http-equiv" in each)
    assert found["http-equiv"] == "Content-Security-Policy"
    return found["content"] or ""


def document(name: str, count: int) -> Document:
    bars = [Bar(name, (1,))] * count
    return (
        Heading(name),
        Verdict(name),
        Table((name,), [(name,)] * count),
        Text([name] * count, mark="-"),
        BarChart(title=name, kinds=("all",), bars=bars, units=Units.GB),
    )


@pytest.mark.parametrize("name", quick(COMMANDS, COMMANDS.keys() - {"fits"}))
def test_every_command_writes_a_page_and_a_picture(memfit: Memfit, name: str) -> None:
    for suffix in ("html", "svg"):
        run = memfit(*COMMANDS[name].split(), "-o", f"x.{suffix}")
        assert (run.code in (0, 1), run.out, run.err) == (True, "", "")
    text = Path("x.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(text.encode()) <= LARGEST
    assert {tag for tag, _ in page.tags} >= {"header", "main", "footer", "h1", "svg", "table"}
    assert len(page.every("h1")) == 1
    assert not {"src", "href", "style"} & {key for _, each in page.tags for key in each}
    assert not [key for _, each in page.tags for key in each if key.startswith("on")]
    assert all(each.get("scope") for each in page.every("th"))
    assert len(page.every("caption")) == len(page.every("table"))
    assert {each.get("tabindex") for each in page.every("div") if "role" in each} == {"0"}
    picture = ElementTree.fromstring(Path("x.svg").read_text(encoding="utf-8"))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [each for each in picture.iter() if "href" in " ".join(each.keys())]
    for each in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(each.get("x", 0)) + float(each.get("width", 0)) <= 720


def test_an_answer_without_a_chart_has_a_page_and_no_picture(memfit: Memfit) -> None:
    assert memfit(*REQUEST.split(), "-o", "x.html").code == 0
    Page(Path("x.html").read_text(encoding="utf-8"))
    assert_one_line(memfit(*REQUEST.split(), "-o", "x.svg"), 2, "no chart", "--format html")
    assert not Path("x.svg").exists()


def test_the_gate_writes_a_page_by_its_suffix(memfit: Memfit) -> None:
    target = f"model: {SMALL}, memory: 8GB, workload: {{context: 4k}}, limits: {{peak: 50%}}"
    Path("memfit.yaml").write_text(f"schema: memfit.policy/1\ntargets:\n  one: {{{target}}}\n")
    assert memfit("gate", "-o", "x.html", "--output", "svg=y.svg").code == 1
    page = Page(Path("x.html").read_text(encoding="utf-8"))
    assert "Gate not passed" in "".join(page.inside["h1"])
    assert "over" in Path("y.svg").read_text(encoding="utf-8")
    assert_one_line(memfit("gate", "-o", "x.pdf"), 2, "x.pdf", ".html")


def test_the_policy_allows_the_page_s_own_style_and_script_alone(memfit: Memfit) -> None:
    memfit(*COMMANDS["estimate"].split(), "-o", "x.html")
    page = Page(Path("x.html").read_text(encoding="utf-8"))
    (style,), (data, script) = page.inside["style"], page.inside["script"]
    assert policy(page) == (
        f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(script)};"
        " base-uri 'none'; form-action 'none'"
    )
    assert [each.get("type") for each in page.every("script")] == ["application/json", None]
    assert json.loads(data)["points"]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|createEl", script
    )
    labelled = {each["for"] for each in page.every("label")}
    assert labelled == {each["id"] for each in page.every("input")}
    assert all(each["aria-valuetext"] for each in page.every("input"))


def test_a_page_without_sliders_has_no_script() -> None:
    page = Page(to_page((Heading("x"), Verdict("y"))))
    assert "script" not in policy(page)
    assert page.every("script") == []


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart(scheme: int) -> None:
    sheet = palette().split("@media")[scheme]
    tones = {
        name: luminance(tone) for name, tone in re.findall("--([a-z0-9]+):#([0-9a-f]+)", sheet)
    }

    def contrast(one: str, other: str) -> float:
        dark, light = sorted((tones[one], tones[other]))
        return (light + 0.05) / (dark + 0.05)

    for verdict in ("fits", "tight", "exceeds", "unknown", "paper"):
        assert contrast("ink", verdict) >= 4.5
    assert min(contrast("dim", "paper"), contrast("bad", "paper")) >= 4.5
    kinds = ("paper", "k0", "k1", "k2", "paper", "k1")
    assert all(contrast(*pair) >= 3 for pair in itertools.pairwise(kinds))


def luminance(tone: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    values = [int(tone[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_page_shows_every_text_and_interprets_none(text: str) -> None:
    plain, hostile = Page(written("plain", "html")), Page(written(text, "html"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    for tag in ("title", "h1", "h2", "li", "th", "td", "caption", "code"):
        shown = [data.replace("plain", visible(text)) for data in plain.inside[tag]]
        assert "".join(hostile.inside[tag]) == "".join(shown).replace("  ", " ") or text == "\\"


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_picture_shows_every_text_and_interprets_none(text: str) -> None:
    plain = ElementTree.fromstring(written("plain", "svg"))
    hostile = ElementTree.fromstring(written(text, "svg"))
    assert {each.tag for each in hostile.iter()} == {each.tag for each in plain.iter()}
    assert visible(text) in "".join(hostile.itertext())


def test_a_model_s_name_stays_text_in_every_place(memfit: Memfit, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>&</script>"
    folder.mkdir(parents=True)
    model = write_config(folder, QWEN3_4B)
    assert memfit("estimate", model, "--memory", "32GB", "-o", "x.html").code == 0
    page = Page(Path("x.html").read_text(encoding="utf-8"))
    assert page.every("img") == []
    assert "onerror=alert(1)" in "".join(page.inside["h1"])


def test_a_fragment_is_one_element_with_its_style_and_without_a_script() -> None:
    page = Page(to_fragment(View("x").document()))
    assert [tag for tag, _ in page.tags[:2]] == ["style", "div"]
    assert page.every("script") == page.every("html") == []
    (style,) = page.inside["style"]
    selectors = re.findall(r"([^{}]+)\{[^{}]*\}", style)
    assert all(".memfit" in each or "[hidden]" in each for each in selectors)


@pytest.mark.exhaustive
def test_what_is_long_is_cut_to_keep_the_page_small() -> None:
    text = to_page(document("a name of thirty characters or so", 3_000))
    assert len(text.encode()) <= LARGEST
    for what in ("rows", "lines", "bars"):
        assert re.search(f"[0-9]+ more {what} are left out", text)
    with pytest.raises(InputError, match="larger than 300 KB"):
        to_page(document("x" * LARGEST, 1))
    assert "left out" not in to_page(document("short", 20))


@pytest.mark.exhaustive
def test_points_of_sliders_are_estimates() -> None:
    catalog = Catalog()
    for sample, expected in (("qwen3-0.6b", (None, 8, 6, 5, 4)), ("gpt-oss-20b", (None,))):
        sized = catalog.sized(str(SAMPLES / f"{sample}.yaml"))
        asked = Workload(prompt_tokens=3000, max_tokens=100, batch=3, prefill_step=700)
        found = explore(sized, asked)
        names = list(found.values)
        counts = [len(values) for values in found.values.values()]
        total = prod(counts)
        assert len(found.points) == total <= 5 * 8 * 3 * 4 * 4
        assert found.values.get("weight_bits", (None,)) == expected
        for index in Random(sample).sample(range(total), 12):
            settings, rest = {}, index
            for name, count in zip(reversed(names), reversed(counts), strict=True):
                rest, place = divmod(rest, count)
                settings[name] = found.values[name][place]
            start = asked.quantized_kv_start if settings["kv_bits"] is None else 0
            bits = settings.pop("weight_bits", None)
            converted = with_weight_bits(sized, bits) if bits else sized
            workload = replace(asked, **settings, quantized_kv_start=start)
            point = found.points[index]
            if point.needed_bytes is None:
                with pytest.raises(Exception, match=re.escape(point.reason)):
                    estimate(converted, workload, advises=False)
                continue
            answer = estimate(converted, workload, advises=False)
            assert (point.needed_bytes, point.verdict) == (answer.needed_bytes, answer.verdict)
            parts = answer.components
            assert point.weights_bytes == parts.weights.resident_bytes
            assert point.cache_bytes == parts.kv.bytes + parts.ssm.bytes


def test_weight_bits_are_a_slider_and_the_meter_is_full_at_the_limit(memfit: Memfit) -> None:
    memfit("estimate", SAMPLES / "qwen3-0.6b.yaml", "--memory", "8GB", "-o", "x.html")
    page = Page(Path("x.html").read_text(encoding="utf-8"))
    assert "Weights" in page.inside["label"]
    data = json.loads(page.inside["script"][0])
    assert [data["texts"][place] for place in data["values"][0]] == [
        *("16 bits", "8 bits", "6 bits", "5 bits", "4 bits"),
    ]
    assert [each["max"] for each in page.every("meter")] == ["100"]
    weights = {point[3] for point in data["points"]}
    assert len(weights) == 5  # each of them has weights of its own


def test_a_page_draws_the_row_to_take_with_the_limit_as_a_full_bar(memfit: Memfit) -> None:
    """That of 32k has to change its KV bits here: 'KV 8 bits' is not among the weights' rows."""
    memfit(*COMMANDS["estimate"].split(), "-o", "x.html")
    text = Path("x.html").read_text(encoding="utf-8")
    (drawn,) = re.findall(r'<svg role="img"[^>]*a full bar is all.*?</svg>', text)
    lines = {float(x) for x in re.findall(r'<path d="M([0-9.]+) [^"]*" class="limit"/>', drawn)}
    assert max(lines) == 419  # of 420; the other is a sample in the legend
    ends = [
        float(x) + float(w) for x, w in re.findall(r'<rect x="(\S+)" y="\S+" width="(\S+)"', drawn)
    ]
    assert max(ends) <= 420


@pytest.mark.parametrize("name", ["fits", "server", "estimate"])
def test_rows_of_words_are_stacked_on_a_phone_and_a_matrix_is_not(
    memfit: Memfit, name: str
) -> None:
    memfit(*COMMANDS[name].split(), "-o", "x.html")
    page = Page(Path("x.html").read_text(encoding="utf-8"))
    stacked = [each for each in page.every("table") if each.get("class") == "stack"]
    labels = {each["data-label"] for each in page.every("td") if each.get("data-label")}
    expected = {
        "fits": {"weights", "needs GB", "longest"},
        "server": set(),
        "estimate": {"Costs", "Needs", "Commands"},
    }[name]
    assert labels >= expected
    assert bool(stacked) == bool(expected)
    assert not labels & {"4k", "16k"}


def test_a_server_s_page_draws_the_bound_and_every_mix(memfit: Memfit) -> None:
    command = f"plan server {SMALL} --memory 16GB --context 2k --clients 8"
    mixes = memfit(*command.split(), "--json").json["mixes"]
    assert len(mixes) > 1
    memfit(*command.split(), "-o", "x.html")
    text = Path("x.html").read_text(encoding="utf-8")
    (drawn,) = re.findall(r"<svg.*?What the server needs.*?</svg>", text)
    for name in ("at most, in any order", *(mix["name"] for mix in mixes)):
        assert f">{name}</text>" in drawn


def test_a_gate_s_chart_has_one_unit(memfit: Memfit) -> None:
    """Bytes of a model and bytes of a token are shares of their limits, with their own units."""
    target = (
        "memory: 16GB, workload: {context: 4k}, limits: {peak: 90%, growth: {kv_per_token: 0%}}"
    )
    Path("memfit.yaml").write_text(f"schema: memfit.policy/1\ntargets:\n  one: {{{target}}}\n")
    models = (SAMPLES / "qwen3-8b-4bit.yaml", SAMPLES / "qwen3-14b-4bit.yaml")
    assert memfit("gate", *models, "-o", "y.svg").code == 1
    picture = ElementTree.fromstring(Path("y.svg").read_text(encoding="utf-8"))
    text = "".join(picture.itertext())
    assert "growth of KV per token" in text
    assert re.search(r"[0-9.]+ kB of [0-9.]+ kB", text)
    limits = {
        each.get("d", "").split("V")[0].split(" ")[0]
        for each in picture.iter("{http://www.w3.org/2000/svg}path")
        if each.get("class") == "limit"
    }
    assert len(limits) == 2  # that of the legend, and one for all bars
