"""The search for a setting gives what brute force gives, in few evaluations."""

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.sizing.search import context_lengths, first_fitting, largest_within

REJECTIONS: tuple[type[InputError | UnsupportedError], ...] = (InputError, UnsupportedError)


def judged(seen: list[int], fitting: set[int], rejected: set[int]) -> Callable[[int], bool]:
    """Return a check that records its arguments, and rejects some of them."""

    def fits(candidate: int) -> bool:
        seen.append(candidate)
        if candidate in rejected:
            raise REJECTIONS[candidate % 2](f"{candidate} cannot be run")
        return candidate in fitting

    return fits


@given(
    st.integers(0, 5000), st.integers(1, 300), st.integers(0, 6000), st.integers(0, 6000), st.data()
)
def test_a_monotone_search_equals_brute_force_in_few_evaluations(
    most: int, step: int, largest: int, rejected_from: int, data: st.DataObject
) -> None:
    candidates = range(most, 0, -step)
    if data.draw(st.booleans()):
        candidates = range(0, most, step)[::-1]
    fitting = {each for each in candidates if each <= largest}
    rejected = {each for each in candidates if each >= rejected_from}
    seen: list[int] = []
    found = first_fitting(candidates, judged(seen, fitting, rejected), monotone=True)
    assert found == max(fitting - rejected, default=None)
    assert len(seen) <= len(candidates).bit_length()  # floor(log2 n) + 1


@given(st.data())
def test_the_largest_that_fits_equals_brute_force_whatever_the_excess(data: st.DataObject) -> None:
    low = data.draw(st.integers(0, 50))
    high = low + data.draw(st.integers(0, 500))
    # Also in bytes, where a number is exactly at the limit.
    largest = data.draw(st.sampled_from([1, 10**12]))
    steps = data.draw(st.lists(st.integers(0, largest), min_size=high + 1, max_size=high + 1))
    start = data.draw(st.integers(-10 * largest, 0))
    over = list(accumulate(steps, initial=start))
    unknown = {each for each in range(high + 1) if data.draw(st.booleans()) and over[each] > 0}
    rejected_from = data.draw(st.integers(low + 1, high + 2))
    seen: list[int] = []

    def excess(number: int) -> int | None:
        seen.append(number)
        if number >= rejected_from:
            raise REJECTIONS[number % 2](f"{number} cannot be run")
        return None if number in unknown else over[number]

    fitting = {each for each in range(low, high + 1) if over[each] <= 0 and each < rejected_from}
    assert largest_within(excess, low, high) == max(fitting, default=low)
    assert len(seen) <= 14 + (high - low).bit_length()


@given(
    st.lists(st.integers(0, 50), unique=True),
    st.sets(st.integers(0, 50)),
    st.sets(st.integers(0, 50)),
)
def test_any_other_search_evaluates_in_order_up_to_the_first_that_fits(
    candidates: list[int], fitting: set[int], rejected: set[int]
) -> None:
    seen: list[int] = []
    found = first_fitting(candidates, judged(seen, fitting, rejected))
    good = [each for each in candidates if each in fitting - rejected]
    assert found == (good[0] if good else None)
    assert seen == (candidates[: candidates.index(good[0]) + 1] if good else candidates)


@pytest.mark.parametrize("monotone", [False, True])
def test_an_unexpected_error_is_not_hidden(monotone: bool) -> None:
    def fits(_: int) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        first_fitting([2, 1], fits, monotone=monotone)


def test_context_lengths_are_multiples_of_256_with_the_longest_first() -> None:
    assert list(context_lengths(1000)) == [768, 512, 256]
    assert list(context_lengths(256)) == [256]
    assert not context_lengths(255)


def test_a_low_end_that_is_over_by_as_much_as_the_high_one_is_searched_from() -> None:
    # A prompt fits, and a shorter one takes more than that: its length is where a search begins.
    assert largest_within(lambda _: 5, 3, 100) == 3
    assert largest_within(lambda value: 5 if value < 40 else value - 90, 3, 100) in range(3, 91)
