"""Which tests run: all of them within the days that divide the sweeps."""

import pytest

from tests.selection import DAYS, SWEEP, of_day


class Case(pytest.Item):
    def runtest(self) -> None:
        """Nothing."""


def cases(request: pytest.FixtureRequest, name: str, count: int, *marks: object) -> list[Case]:
    found = [Case.from_parent(request.session, name=f"{name}[{n}]") for n in range(count)]
    for case in found:
        for mark in marks:
            case.add_marker(mark)  # type: ignore[arg-type]
    return found


def test_the_days_divide_the_sweeps_between_them(request: pytest.FixtureRequest) -> None:
    sweep = cases(request, "sweep", 30, pytest.mark.exhaustive)
    days = [of_day(sweep, day) for day in range(100, 100 + DAYS)]
    assert sorted(case.name for day in days for case in day) == sorted(case.name for case in sweep)
    assert all(days)


def test_what_is_no_sweep_runs_every_day(request: pytest.FixtureRequest) -> None:
    items = [
        *cases(request, "quick", 30),
        *cases(request, "few", SWEEP - 1, pytest.mark.exhaustive),
        *cases(request, "pages", 30, pytest.mark.exhaustive(daily=True)),
    ]
    assert all(of_day(items, day) == items for day in range(DAYS))
