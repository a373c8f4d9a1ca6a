"""One loaded process at a time: a dead one is replaced, unless the next one dies the same way."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import pytest

from memfit.estimators.base.progress import FinishedRequest
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.opening import size
from memfit.probes.experiments.base import RunRequest
from memfit.probes.experiments.points import Points
from memfit.probes.model_runner import ModelRunner
from memfit.probes.process import ModelProcess, ProbeStopped
from memfit.probes.worker import Worker
from tests.checkpoints import Checkpoints

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
WORKLOAD = Workload(prompt_tokens=70, max_tokens=3, prefill_step=32)
HOST = Device("this host", "cpu", 10**9, 10**9, None, "flag")


class Started:
    """Starts processes of one model and records them."""

    def __init__(self, path: Path, memory_limit_bytes: int | None = None) -> None:
        self.path, self.limit = path, memory_limit_bytes
        self.processes: list[ModelProcess] = []

    def __call__(self) -> ModelProcess:
        process = ModelProcess(self.path, memory_limit_bytes=self.limit, timeout_seconds=60)
        self.processes.append(process)
        return process

    def kill(self) -> None:
        pid = self.processes[-1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


class Counting:
    """Counts the steps of the runs, and does something after each."""

    def __init__(self) -> None:
        self.steps = 0
        self.after: Iterator[Callable[[], object]] = repeat(lambda: None)

    def advance(self, steps: int = 1) -> None:
        self.steps += steps
        next(self.after)()

    def begin(self, what: str, steps: int) -> None: ...
    def end(self) -> None: ...
    def request(self, request: FinishedRequest) -> None: ...


@pytest.fixture
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("no-tokenizer")


@pytest.fixture
def started(model: Path) -> Started:
    return Started(model)


@pytest.fixture
def worker(started: Started) -> Iterator[Worker]:
    with Worker(started) as worker:
        worker.prompt(None, 70)
        yield worker


def test_a_dead_process_fails_its_run_and_the_next_run_starts_another(
    worker: Worker, started: Started
) -> None:
    before = worker.call(ModelRunner.run, WORKLOAD, None)
    assert len(started.processes) == 1
    started.kill()
    with pytest.raises(ProbeStopped, match="SIGKILL"):
        worker.call(ModelRunner.run, WORKLOAD, None)
    # The worker gives the prompt to the new process.
    assert worker.call(ModelRunner.run, WORKLOAD, None).kv_bytes == before.kv_bytes
    assert len(started.processes) == 2


def test_a_session_saves_complete_measurements_and_shows_the_others(
    worker: Worker, started: Started, model: Path
) -> None:
    kept: list[Measurement] = []
    progress = Counting()
    sized = size(open_checkpoint(str(model)), device=HOST)
    session = Points(
        request=RunRequest(checkpoint=sized.checkpoint),
        start=started,
        save=kept.append,
        versions=worker.versions,
        machine=HOST,
        sized=sized,
        worker=worker,
        progress=progress,
    )
    whole = session.measure(WORKLOAD)
    assert (whole.status, whole.repeats, whole.measurement_id) == ("measured", 3, kept[0].id)
    # A warm-up, three repeats, and mlx-swift-lm's rule.
    assert session.finished_runs == progress.steps == 5
    assert session.from_measurement(kept[0]) == whole
    once = session.measure(WORKLOAD, repeats=1)
    assert (once.status, once.repeats, once.measurement_id) == ("measured", 1, None)
    progress.after = iter((lambda: None, started.kill))  # the warm-up, the first repeat
    cut = session.measure(WORKLOAD)
    assert (cut.status, cut.repeats, cut.measurement_id) == ("failed", 1, None)
    assert "SIGKILL" in str(cut.reason)
    assert cut.peak_bytes is not None
    assert len(kept) == 1


@pytest.mark.exhaustive
def test_a_process_killed_before_it_has_loaded_fails_one_run_only(
    worker: Worker, started: Started
) -> None:
    started.kill()
    with pytest.raises(ProbeStopped, match=r"loading .*\(SIGKILL\)"):
        worker.call(ModelRunner.run, WORKLOAD, None)
    assert worker.call(ModelRunner.run, WORKLOAD, None).kv_bytes > 0
    assert len(started.processes) == 2


@pytest.mark.exhaustive
def test_a_model_that_fails_to_load_twice_in_a_row_is_not_started_again(model: Path) -> None:
    started = Started(model, memory_limit_bytes=1_000)
    with Worker(started) as worker:
        for _ in range(3):
            with pytest.raises(ProbeStopped, match="limit"):
                worker.call(ModelRunner.run, WORKLOAD, None)
    assert len(started.processes) == 2
