"""What the measuring process reports during a call."""

from itertools import count
from threading import Event

import pytest

from memfit.probes import run_monitor
from memfit.probes.run_monitor import heartbeat

PATIENCE_SECONDS = 60


def test_heartbeat_reports_only_work_that_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_monitor, "_REPORT_EVERY_NS", 1_000_000)
    moving: list[dict[str, int]] = []
    reported = Event()

    def report(figures: dict[str, int]) -> None:
        moving.append(figures)
        reported.set()

    with heartbeat(report, count().__next__):
        assert reported.wait(PATIENCE_SECONDS)
    assert moving[0] == {}

    idle: list[dict[str, int]] = []
    polls, polled = count(), Event()

    def unchanged() -> None:
        if next(polls) == 2:
            polled.set()

    with heartbeat(idle.append, unchanged):
        assert polled.wait(PATIENCE_SECONDS)
    assert idle == []
