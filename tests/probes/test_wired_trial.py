"""A wired limit that cannot be tried is reported, and starts no process."""

from pathlib import Path

import pytest

from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.advise import NO_ADVICE
from memfit.estimators.sizing.opening import size
from memfit.probes.experiments.base import RunRequest
from memfit.probes.experiments.points import Points
from memfit.probes.experiments.recommendation import with_wired_trial
from memfit.probes.process import ModelProcess
from memfit.probes.result import Point
from memfit.probes.worker import Worker
from tests.models import QWEN3_4B, write_config
from tests.probes.points import point, unmeasured

GB = 10**9
MAC = Device("a Mac", "metal", 64 * GB, 50 * GB, None, "detected", "s", 16)
WORKLOAD = Workload(prompt_tokens=64)


def never() -> ModelProcess:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (point(WORKLOAD, GB), "none is recommended, so none was tried"),
        (unmeasured(WORKLOAD), "not tried: the workload was not measured"),
    ],
    ids=["measured", "failed"],
)
def test_a_wired_limit_that_is_not_tried_is_reported(
    tmp_path: Path, asked: Point, reason: str
) -> None:
    sized = size(open_checkpoint(str(write_config(tmp_path, QWEN3_4B))), device=MAC)
    session = Points(
        request=RunRequest(checkpoint=sized.checkpoint),
        start=never,
        save=lambda _: None,
        machine=MAC,
        sized=sized,
        worker=Worker(never),
    )
    points, found = with_wired_trial(session, (asked,), NO_ADVICE.recommendation, Units.GB)
    assert points == (asked,)
    assert found.wired_limit_bytes.reason == f"not searched; {reason}"


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("x86_64 CPU", "by policy alone for"),
        ("Apple M4 CPU", "by policy, with a baseline or a cap,"),
    ],
)
def test_a_limit_without_metal_is_by_policy_alone_only_where_that_admits_anything(
    tmp_path: Path, name: str, alone: str
) -> None:
    here = Device(name, "cpu", 64 * GB, 64 * GB, None, "detected")
    sized = size(open_checkpoint(str(write_config(tmp_path, QWEN3_4B))), device=here)
    session = Points(
        request=RunRequest(checkpoint=sized.checkpoint),
        start=never,
        save=lambda _: None,
        machine=here,
        sized=sized,
        worker=Worker(never),
    )
    measured = point(WORKLOAD, 9 * GB)
    _, found = with_wired_trial(session, (measured,), NO_ADVICE.recommendation, Units.GB)
    assert alone in (found.wired_limit_bytes.reason or "")
