"""What the measuring process reports during a call."""

import time
from itertools import count

from memfit.probes.run_monitor import heartbeat


def test_heartbeat_reports_only_work_that_makes_progress() -> None:
    moving: list[dict[str, int]] = []
    with heartbeat(moving.append, count().__next__):
        time.sleep(1.2)
    idle: list[dict[str, int]] = []
    with heartbeat(idle.append, lambda: None):
        time.sleep(1.2)
    assert moving == [{}]
    assert idle == []
