"""The pages in a real browser: from disk, without requests, by keyboard, narrow, dark, hostile.

`make test-browser` installs Chromium where Debian's packages are, and runs these tests.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.estimators.base.units import format_bytes
from tests.browser.devtools import Tab, find_chromium, opened_tab
from tests.browser.screenshots import DOCS, PICTURES, Picture, size_of
from tests.cli.test_first_screen import SAMPLES
from tests.cli.test_pages import COMMANDS, REQUEST, SMALL
from tests.models import QWEN3_4B, write_config
from tests.test_docs import run

pytestmark = pytest.mark.exhaustive

NAME = "<img src=x onerror=alert(1)>&<script>alert(2)<"
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9}

# Every text with the colours that it is shown in: a page draws on the nearest background.
CONTRASTS = """
(() => {
  const channel = (value) => value <= 10.31475 ? value / 3294.6
    : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([red, green, blue]) =>
    0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  const numbers = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const tones = numbers(getComputedStyle(each).backgroundColor);
      if (tones.length === 3 || tones[3] > 0) return tones;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, box = element.getBoundingClientRect();
    if (!walker.currentNode.data.trim() || !box.width || /SCRIPT|STYLE/i.test(element.tagName))
      continue;
    const style = getComputedStyle(element);
    const ink = numbers(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(ink), luminance(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.slice(0, 40)]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("Chromium is not installed: pages are not tested in a browser")
    with opened_tab(chromium, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every command, of a gate, of a traced run and of a hostile name."""
    folder = tmp_path_factory.mktemp("pages")
    target = f"model: {SMALL}, memory: 8GB, workload: {{context: 4k}}, limits: {{peak: 50%}}"
    policy = f"schema: memfit.policy/1\ntargets:\n  one: {{{target}}}\n"
    (folder / "memfit.yaml").write_text(policy, encoding="utf-8")
    model = write_config(folder / NAME, QWEN3_4B)
    commands = {
        **COMMANDS,
        "request": REQUEST,
        "gate": "gate",
        "hostile": f"estimate '{model}' --memory 32GB",
        "grid": f"estimate {SAMPLES}/qwen3.5-35b-a3b.yaml --memory 32GB",
        "refused": f"estimate {SAMPLES}/gpt-oss-20b.yaml --memory 24GB",
        "traced": f"estimate {SAMPLES}/qwen3-0.6b.yaml --memory 8GB --method trace",
    }
    for name, command in commands.items():
        out, code = run(f"memfit {command} --output {name}.html", folder=folder)
        assert code in (0, 1), out
    return {name: folder / f"{name}.html" for name in commands}


def test_every_page_opens_from_disk_without_a_message_or_a_request(
    tab: Tab, pages: dict[str, Path]
) -> None:
    for path in pages.values():
        tab.open(path)
        assert (path.name, tab.complaints()) == (path.name, [])
        assert tab.requests() == [path.as_uri()]


def test_the_policy_refuses_what_the_page_did_not_bring(
    tab: Tab, pages: dict[str, Path], tmp_path: Path
) -> None:
    added = "<script>document.title = 'changed'</script><p style='color:red'></p><img src='x.png'>"
    path = tmp_path / "changed.html"
    text = pages["estimate"].read_text(encoding="utf-8")
    path.write_text(text.replace("</main>", f"{added}</main>"), encoding="utf-8")
    tab.open(path)
    assert tab.run("document.title") != "changed"
    assert len(tab.complaints()) == 3
    failed = [event["params"] for event in tab.events if "loadingFailed" in event["method"]]
    assert [each["blockedReason"] for each in failed] == ["csp"]


def test_no_page_scrolls_sideways_on_a_phone(tab: Tab, pages: dict[str, Path]) -> None:
    for path in pages.values():
        tab.open(path, width=360)
        widths = tab.run("[innerWidth, document.documentElement.scrollWidth]")
        assert (path.name, widths) == (path.name, [360, 360])  # a wider page is shown smaller


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_enough_contrast(tab: Tab, pages: dict[str, Path], dark: bool) -> None:
    for path in pages.values():
        tab.open(path, dark=dark)
        found = tab.run(CONTRASTS)
        assert len(found) > 5
        assert [each for each in found if each[0] < LEAST_CONTRAST] == []


def test_a_dark_page_is_dark(tab: Tab, pages: dict[str, Path]) -> None:
    tones = []
    for dark in (False, True):
        tab.open(pages["estimate"], dark=dark)
        colour = tab.run("getComputedStyle(document.body).backgroundColor")
        tones.append(sum(map(int, re.findall(r"\d+", colour))))
    assert tones[0] > 700
    assert tones[1] < 100


def test_sliders_are_moved_by_keyboard_and_show_estimates(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["estimate"])
    for _ in range(30):
        tab.press("Tab", KEYS["Tab"])
        if tab.run("document.activeElement.id") == "slider-0":
            break
    before = tab.run("answer.textContent")
    tab.press("Home", KEYS["Home"])
    assert tab.run("document.activeElement.getAttribute('aria-valuetext')") == "4096 tokens"
    tab.press("ArrowRight", KEYS["ArrowRight"])
    assert tab.run("document.getElementById('slider-0-value').textContent") == "16384 tokens"
    tab.press("Tab", KEYS["Tab"])
    tab.press("ArrowRight", KEYS["ArrowRight"])
    tab.press("Tab", KEYS["Tab"])
    tab.press("Tab", KEYS["Tab"])
    tab.press("End", KEYS["End"])
    shown = tab.run(
        "[...document.querySelectorAll('.sliders span')].map((each) => each.textContent)"
    )
    assert shown == ["16384 tokens", "4 sequences", "not quantised", "128 tokens"]
    settings = "--context 16k --batch 4 --prefill-step 128"
    out, _ = run(f"memfit estimate {SMALL} --memory 8GB {settings} --json")
    answer = json.loads(out)
    assert f"needs {format_bytes(answer['needed_bytes'])} of" in tab.run("answer.textContent")
    assert answer["verdict"] in tab.run("answer.className")
    assert tab.run("answer.textContent") != before


def test_weight_bits_are_changed_on_the_page(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["grid"])
    tab.run("document.getElementById('slider-0').focus()")
    tab.press("End", KEYS["End"])
    assert tab.run("document.getElementById('slider-0-value').textContent") == "4 bits"
    out, _ = run(
        f"memfit estimate {SAMPLES}/qwen3.5-35b-a3b.yaml --memory 32GB --quantize 4 --json"
    )
    answer = json.loads(out)
    assert f"needs {format_bytes(answer['needed_bytes'])} of" in tab.run("answer.textContent")
    assert answer["verdict"] in tab.run("answer.className")
    share = -(-100 * answer["needed_bytes"] // answer["device"]["working_set_bytes"])
    assert tab.run("document.querySelector('meter').value") == share
    # 16 bits do not fit: the meter is full, and no longer than that.
    tab.press("Home", KEYS["Home"])
    assert tab.run("document.querySelector('meter').value") == 100


# What a phone shows of the rows of words, without scrolling: text, left and right of each cell.
CELLS = """
[...document.querySelectorAll('table.stack tbody tr')].map((row) =>
  [...row.children].map((cell) => {
    const box = cell.getBoundingClientRect();
    return [cell.textContent, box.left, box.right, box.top];
  }).filter(([, left, right]) => right > left))
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["fits", "gate", "grid"])
def test_a_phone_shows_every_cell_of_a_row_within_its_width(
    tab: Tab, pages: dict[str, Path], name: str, dark: bool
) -> None:
    tab.open(pages[name], width=375, dark=dark)
    rows = tab.run(CELLS)
    assert rows
    assert all(left >= 0 and right <= 375 for row in rows for _, left, right, _ in row)
    for first, *others in rows:
        assert first[1] < 40  # the name of the row is above its cells
        assert all(top > first[3] for *_, top in others)


def test_commands_are_under_their_row_on_a_phone_and_beside_it_on_a_desktop(
    tab: Tab, pages: dict[str, Path]
) -> None:
    for width in (375, 1280):
        tab.open(pages["grid"], width=width)
        row = next(row for row in tab.run(CELLS) if "mlx_lm." in row[-1][0])
        name, commands = row[0], row[-1]
        assert (commands[3] > name[3]) == (width == 375)
        assert (commands[1] < 40) == (width == 375)


@pytest.mark.parametrize("width", [375, 1280])
def test_the_bars_of_the_row_to_take_end_at_the_limit(
    tab: Tab, pages: dict[str, Path], width: int
) -> None:
    tab.open(pages["grid"], width=width)
    ends = tab.run(
        "(() => { const svg = [...document.querySelectorAll('svg')].find((each) =>"
        " each.getAttribute('aria-label').includes('a full bar'));"
        " const right = svg.getBoundingClientRect().right;"
        " return [...svg.querySelectorAll('path.limit, rect')].map((each) =>"
        " right - each.getBoundingClientRect().right); })()"
    )
    assert min(ends) > -0.5
    assert sum(end < 3 for end in ends) >= 2


def test_the_server_s_page_names_the_bound_and_the_mixes(tab: Tab, pages: dict[str, Path]) -> None:
    for width in (375, 1280):
        tab.open(pages["server"], width=width)
        drawn = tab.run(
            "[...document.querySelectorAll('svg text')].map((each) => each.textContent)"
        )
        assert {"at most, in any order", "equal requests"} <= set(drawn)


@pytest.mark.parametrize("picture", PICTURES, ids=[each.name for each in PICTURES])
def test_the_screenshots_of_the_docs_are_made_here(
    tab: Tab, pages: dict[str, Path], picture: Picture
) -> None:
    """Their pixels depend on the fonts; their size and their place in the docs do not."""
    image = picture.taken(tab, pages["grid"])
    committed = (DOCS / "images" / picture.name).read_bytes()
    assert size_of(committed) == size_of(image) == (picture.width, picture.height)
    assert f"](images/{picture.name})" in (DOCS / "reports.md").read_text(encoding="utf-8")


def test_what_a_runtime_cannot_run_says_why(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["refused"])
    tab.run("document.getElementById('slider-2').focus()")
    tab.press("End", KEYS["End"])
    assert "rotating" in tab.run("answer.textContent")
    assert tab.run("answer.className") == "verdict unknown"


def test_a_screen_reader_finds_a_name_for_everything(tab: Tab, pages: dict[str, Path]) -> None:
    for path in pages.values():
        tab.open(path)
        nodes = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tab("Accessibility.getFullAXTree")["nodes"]
            if not node["ignored"] and "role" in node
        ]
        roles = {role for role, _ in nodes}
        assert roles >= {"main", "banner", "contentinfo", "heading"}
        named = ("slider", "image", "table", "region", "meter", "columnheader", "rowheader")
        without = [node for node in nodes if node[0] in named and not node[1].strip()]
        assert (path.name, without) == (path.name, [])


def test_a_model_s_name_is_text_and_nothing_else(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["hostile"])
    assert NAME in tab.run("document.querySelector('h1').textContent")
    assert tab.run("document.images.length") == 0
    assert tab.run("document.scripts.length") == 2
    assert "Page.javascriptDialogOpening" not in tab.happened()


def test_without_javascript_the_page_is_complete_but_for_the_sliders(
    tab: Tab, pages: dict[str, Path]
) -> None:
    tab("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(pages["estimate"])
        assert tab.complaints() == []
        text = tab.run("document.body.innerText")
        tables = tab.run("document.querySelectorAll('table').length")
        assert tab.run("document.getElementById('sliders').getClientRects().length") == 0
    finally:
        tab("Emulation.setScriptExecutionDisabled", value=False)
    assert "With JavaScript, settings can be changed here." in text
    assert "KV 8 bits" in text
    assert tables >= 3
