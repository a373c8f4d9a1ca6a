"""What the measuring process tells on the way."""

import time
from itertools import count

from memfit.probes.run_monitor import heartbeat


def test_work_that_moves_is_alive_and_work_that_stands_is_not() -> None:
    moving: list[dict[str, int]] = []
    with heartbeat(moving.append, count().__next__):
        time.sleep(1.2)
    standing: list[dict[str, int]] = []
    with heartbeat(standing.append, lambda: None):
        time.sleep(1.2)
    assert moving == [{}]
    assert standing == []
