"""The plot of memory over a run's operations."""

from hypothesis import given
from hypothesis import strategies as st

from memfit.cli.render.chart import run_lines
from memfit.estimators.base.units import Units
from memfit.estimators.results.estimate import RunCall

GB = 10**9
RUN = (
    RunCall("first_chunk", 2048, 0, 4, (2 * GB, 3 * GB, 4 * GB, 3 * GB)),
    RunCall("decode", 1, 2048, 2, (2 * GB, 2 * GB)),
)
WIDTH = 60


def lines(run: tuple[RunCall, ...], budget: int | None = None, width: int = WIDTH) -> list[str]:
    return list(run_lines(run, budget, Units.GB, width, ascii_only=True))


def test_the_peak_is_marked_in_its_call_and_in_the_highest_row() -> None:
    drawn = lines(RUN)
    assert "peak 4.000 GB in first chunk" in drawn[0]
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
