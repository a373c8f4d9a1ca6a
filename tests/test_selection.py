"""Which tests run: all of them within the days that divide the exhaustive ones."""

import pytest

from tests.selection import DAYS, of_day


class Case(pytest.Item):
    def runtest(self) -> None:
        """Nothing."""


def cases(request: pytest.FixtureRequest, name: str, count: int, *marks: object) -> list[Case]:
    found = [Case.from_parent(request.session, name=f"{name}[{n}]") for n in range(count)]
    for case in found:
        for mark in marks:
            case.add_marker(mark)  # type: ignore[arg-type]
    return found


def test_the_days_divide_the_exhaustive_tests_between_them(request: pytest.FixtureRequest) -> None:
    tests = cases(request, "sweep", 300, pytest.mark.exhaustive)
    days = [of_day(tests, day) for day in range(100, 100 + DAYS)]
    assert sorted(case.name for day in days for case in day) == sorted(case.name for case in tests)
    assert all(days)


def test_quick_and_daily_tests_run_every_day(request: pytest.FixtureRequest) -> None:
    items = [
        *cases(request, "quick", 30),
        *cases(request, "pages", 30, pytest.mark.exhaustive(daily=True)),
    ]
    assert all(of_day(items, day) == items for day in range(DAYS))
