"""Charts drawn with characters: one scale, marks and colours, no line wider than the screen."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memfit.cli.render.document import Bar, BarChart, HeatMap, RunChart, Table, Toned
from memfit.cli.render.page import bar
from memfit.cli.render.plot import axis_ends, plot, run_lines
from memfit.estimators.base.units import Units
from memfit.estimators.results.estimate import RunCall

GB = 10**9
RUN = (
    RunCall("first_chunk", 2048, 0, 4, (2 * GB, 3 * GB, 4 * GB, 3 * GB)),
    RunCall("decode", 1, 2048, 2, (2 * GB, 2 * GB)),
)
WIDTH = 60


def lines(run: tuple[RunCall, ...], budget: int | None = None, width: int = WIDTH) -> list[str]:
    chart = RunChart(run=run, budget=budget, units=Units.GB)
    return list(run_lines(chart, width, ascii_only=True))


def test_the_peak_is_marked_in_its_call_and_in_the_highest_row() -> None:
    drawn = lines(RUN)
    assert "peak 4.0 GB in first chunk" in drawn[0]
    marked = [row for row, line in enumerate(drawn) if "^" in line and row]
    assert marked == [1]
    assert drawn[1].split("|")[2].strip() == ""


def test_a_budget_near_the_peak_is_a_line_and_a_far_one_is_text() -> None:
    near, far = lines(RUN, 3 * GB), lines(RUN, 60 * GB)
    assert [line for line in near if line.count("-") > WIDTH // 2]
    assert not [line for line in far if line.count("-") > WIDTH // 2]
    assert "above all of it" in far[1]


def test_each_call_has_a_label_with_its_tokens() -> None:
    assert lines(RUN)[-2].split("  ")[-1].strip() == "decode"
    assert "2048 at 0" in lines(RUN)[-1]


CALLS = st.builds(
    RunCall,
    phase=st.sampled_from(("first_chunk", "last_token")),
    tokens=st.integers(1, 4096),
    position=st.integers(0, 2**20),
    operations=st.integers(1, 9),
    bytes=st.lists(st.integers(0, 2**50), min_size=1, max_size=90).map(tuple),
)


@given(st.lists(CALLS, min_size=1, max_size=6).map(tuple), st.integers(0, 2**51))
@example((RunCall("first_chunk", 1, 0, 1, (0, 1_000_000)),), 0)
def test_no_line_is_wider_than_the_terminal(run: tuple[RunCall, ...], budget: int) -> None:
    drawn = lines(run, budget or None, 100)
    assert all(len(line) <= 100 for line in drawn)
    assert any("^" in line for line in drawn[1:]) or budget


@given(st.lists(CALLS, min_size=1, max_size=7).map(tuple), st.integers(40, 120))
def test_no_number_is_cut_on_a_narrow_terminal(run: tuple[RunCall, ...], width: int) -> None:
    drawn = lines(run, width=width)
    words = [word for line in drawn for word in line.replace(",", " ").split()]
    pairs = [" ".join(words[i : i + 3]) for i in range(len(words))]
    for call in run:
        assert pairs.count(f"{call.tokens} at {call.position}") >= 1


@pytest.mark.parametrize(
    ("least", "most", "ends"),
    [
        (1_600_000, 2_600_000, ("1.6 MB", "2.6 MB")),
        (1_600_000, 1_600_001, ("1600000 B", "1600001 B")),
        (1_600_000, 1_600_000, ("1.6 MB", "")),
    ],
)
def test_the_ends_of_an_axis_never_have_the_same_label(
    least: int, most: int, ends: tuple[str, str]
) -> None:
    assert axis_ends(least, most, Units.GB) == ends


def bars(*sizes: int, limit: int) -> BarChart:
    drawn = [Bar(str(size), (size, 0, 0), limit) for size in sizes]
    return BarChart(title="Bars", kinds=("all",), bars=drawn, units=Units.GB, limit="limit")


def test_a_bar_beyond_its_limit_has_a_word_and_a_colour_and_others_have_neither() -> None:
    _, within, over = plot(bars(GB, 4 * GB, limit=2 * GB), 80, ascii_only=True)
    assert [type(piece) for piece in within] == [str]
    coloured = [piece for piece in over if isinstance(piece, Toned)]
    assert [piece.colour for piece in coloured] == ["red", "red"]
    assert coloured[0].text == "over "
    assert set(coloured[1].text) == {"#"}
    line = "".join(map(str, over))
    assert line.index("|") < len(line) - len(coloured[1].text)


@given(st.lists(st.integers(0, 2**50), min_size=2, max_size=9), st.integers(1, 2**50))
def test_the_bars_of_a_chart_have_one_scale(sizes: list[int], limit: int) -> None:
    chart = bars(*sizes, limit=limit)
    _, *lines = ("".join(map(str, line)) for line in plot(chart, 100, ascii_only=True))
    places = {line.index("|") for line in lines}
    assert len(places) == 1
    lengths = [line.count("#") for line in lines]
    assert sorted(lengths) == [length for _, length in sorted(zip(sizes, lengths, strict=True))]


@given(st.integers(0, 2**50), st.integers(1, 2**50), st.integers(10, 25))
@example(604, 12_713, 25)  # a twentieth was drawn as two characters of 25
def test_a_bar_of_a_table_is_in_proportion(part: int, whole: int, width: int) -> None:
    amount = min(part, whole)
    drawn = bar(amount, whole, width, ascii_only=False)
    eighths = sum(8 if each == "█" else " ▏▎▍▌▋▊▉".index(each) for each in drawn)
    assert abs(eighths * whole - 8 * width * amount) <= whole / 2 or eighths == 1
    assert (eighths > 0) == (amount > 0)
    assert len(bar(amount, whole, width, ascii_only=True)) <= width


@given(st.text(max_size=200), st.integers(60, 140))
def test_a_long_label_gives_way_to_the_bar(label: str, width: int) -> None:
    chart = BarChart(title="", kinds=("all",), bars=[Bar(label, (GB,))], units=Units.GB)
    drawn = ["".join(map(str, line)) for line in plot(chart, width, ascii_only=False)]
    assert max(map(len, drawn)) <= width
    assert drawn[-1].count("█") >= 20
    assert "1.0 GB" in drawn[-1]


def test_a_heat_map_says_with_marks_what_its_colours_say() -> None:
    row = ("4 bits", Toned("1.0", "green"), Toned("2.0 tight", "yellow"), Toned("3.0 no", "red"))
    table = Table(("", "4k", "8k", "16k"), [row], "needs")
    legend, headings, cells = plot(HeatMap(table=table), 60, ascii_only=True)
    assert "does not fit" in str(legend[0])
    assert str(headings[0]).split() == ["4k", "8k", "16k"]
    marks = [
        set(str(cell)) & set("-#")
        for cell in cells
        if getattr(cell, "colour", "") in ("green", "yellow", "red")
    ]
    assert marks == [set(), {"-"}, {"#"}]
