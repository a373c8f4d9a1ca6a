"""Lines through peaks: exact arithmetic on points, and which points to measure."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.peak_fit import Line, Peak, ShortPrompt, calibration, line_through

STEPS = st.sampled_from([128, 256, 512, 1024, 2048])
BYTES = st.integers(0, 2**40)


def solved(*peaks: Peak, prefill_step: int = 512) -> Line:
    line = line_through(peaks, prefill_step=prefill_step)
    assert line is not None
    return line


@given(BYTES, st.integers(0, 2**20), st.integers(0, 2**20), STEPS, st.integers(3, 400))
def test_points_on_a_line_give_its_coefficients(
    fixed: int, per_token: int, per_chunk_token: int, step: int, chunks: int
) -> None:
    asked = calibration(Workload(prompt_tokens=chunks * step + 1, prefill_step=step))
    assert isinstance(asked, tuple)
    line = solved(
        *(
            Peak(
                work.prompt_tokens,
                work.prefill_step,
                fixed + per_token * work.prompt_tokens + per_chunk_token * work.prefill_step,
            )
            for work in asked
        ),
        prefill_step=step,
    )
    assert (line.fixed_bytes, line.per_token) == (fixed, (per_token, 1))
    assert line.per_chunk_token == (per_chunk_token, 1)
    assert (line.residual_bytes, line.points) == (0, 5)


@given(BYTES, BYTES, BYTES)
def test_a_line_goes_exactly_through_the_points_it_was_solved_from(
    long: int, short: int, small: int
) -> None:
    line = solved(Peak(4097, 512, long), Peak(1025, 512, short), Peak(4097, 256, small))
    assert line.peak_bytes(4097, 512) == long
    assert line.peak_bytes(1025, 512) == short
    assert line.peak_bytes(4097, 256) == small


@given(BYTES, BYTES, BYTES)
def test_the_residual_is_the_third_point_minus_the_line(long: int, middle: int, short: int) -> None:
    line = solved(Peak(4097, 512, long), Peak(2049, 512, middle), Peak(1025, 512, short))
    predicted = long - Fraction(long - middle, 2048) * 3072
    assert line.residual_bytes is not None
    assert 0 <= abs(line.residual_bytes) - abs(short - predicted) < 1
    assert line.residual_bytes * (short - predicted) >= 0


def test_the_farther_of_two_third_points_is_the_residual() -> None:
    by_prompt = Peak(4097, 512, 4000), Peak(2049, 512, 2000), Peak(1025, 512, 1010)
    by_step = Peak(4097, 256, 3000), Peak(4097, 128, 2400)
    assert solved(*by_prompt).residual_bytes == 10
    assert solved(*by_prompt, *by_step).residual_bytes == -100


def test_an_error_of_the_slope_grows_with_the_distance() -> None:
    line = solved(Peak(4097, 512, 4000), Peak(2049, 512, 2000), Peak(1025, 512, 1010))
    assert line.measured_tokens == (1025, 4097)
    assert [line.error_bytes(tokens) for tokens in (1, 4097, 4098, 7169)] == [10, 10, 11, 20]


def test_without_a_third_point_no_error_is_known() -> None:
    assert solved(Peak(4097, 512, 4000), Peak(2049, 512, 2000)).error_bytes(10**6) == 0


def test_one_prompt_gives_no_line() -> None:
    assert line_through([Peak(4097, 512, 9), Peak(4097, 256, 8)], prefill_step=512) is None


def test_prompts_with_a_shorter_last_chunk_are_excluded() -> None:
    cut = [Peak(700, 512, 9), Peak(400, 512, 8), Peak(1500, 512, 7)]
    assert line_through([*cut, Peak(4097, 512, 9)], prefill_step=512) is None


def test_one_step_gives_no_coefficient_of_steps() -> None:
    line = solved(Peak(4096, 512, 4000), Peak(2048, 512, 2000))
    assert (line.per_chunk_token, line.residual_bytes, line.points) == (None, None, 2)
    assert line.peak_bytes(4096, 2048) == 4000


def test_the_longest_prompts_give_the_slope() -> None:
    # Caches of windows stop growing: the shorter prompts would make the line too steep.
    line = solved(Peak(8193, 512, 500), Peak(4097, 512, 500), Peak(1025, 512, 100))
    assert line.per_token == (0, 1)
    assert line.residual_bytes == -400


@given(st.integers(1, 100_000), st.integers(1, 4096))
def test_every_chunk_of_a_calibration_is_full(tokens: int, step: int) -> None:
    asked = calibration(Workload(prompt_tokens=tokens, prefill_step=step))
    if isinstance(asked, ShortPrompt):
        assert tokens < asked.least_tokens == 3 * step + 1
        return
    assert len({work.prompt_tokens for work in asked}) == 3
    for work in asked:
        assert work.prompt_tokens <= tokens
        assert set(work.prefill_chunks()) == {work.prefill_step}


@given(st.integers(4, 100_000), st.integers(1, 4096))
def test_a_short_prompt_gets_the_length_it_needs(tokens: int, step: int) -> None:
    asked = calibration(Workload(prompt_tokens=tokens, prefill_step=step))
    if isinstance(asked, ShortPrompt):
        longer = Workload(prompt_tokens=asked.least_tokens, prefill_step=step)
        assert isinstance(calibration(longer), tuple)
        assert asked.largest_step is not None
        smaller = Workload(prompt_tokens=tokens, prefill_step=asked.largest_step)
        assert isinstance(calibration(smaller), tuple)


def test_a_prompt_of_three_tokens_is_too_short_for_a_line() -> None:
    assert calibration(Workload(prompt_tokens=3, prefill_step=512)) == ShortPrompt(1537, None)


def test_no_step_needs_more_chunks_than_a_measurement_allows() -> None:
    asked = calibration(Workload(prompt_tokens=250_001, prefill_step=4))
    assert isinstance(asked, tuple)
    assert {work.prefill_step for work in asked} == {4}
