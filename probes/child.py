"""The process that loads and runs a model: `python -m memfit.probes.child`.

`ModelProcess` starts it. Each line of JSON on standard input calls a method of the runner. The
answers are lines of JSON too: any number of {"progress"}, then one {"result"} or {"error"}.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from memfit.estimators.base.errors import MemfitError
from memfit.probes.codeless import forbid_repository_code, refusals
from memfit.probes.disk_reads import DiskRunner
from memfit.probes.experts.runner import ExpertRunner
from memfit.probes.kit.runner import KitRunner
from memfit.probes.model_runner import ModelRunner
from memfit.probes.process import RunnerSetup, arguments_of, decoded, encoded
from memfit.probes.prompt_caches.runner import CacheRunner
from memfit.probes.run_monitor import ReportFigures
from memfit.probes.training_runner import TrainingRunner
from memfit.probes.vision_runner import VisionRunner

# When memory runs out, Linux ends this process first, not one of the user's: proc(5).
_HIGHEST_OOM_SCORE = "1000"


def _runner(setup: RunnerSetup, report: ReportFigures) -> ModelRunner:
    path, limit = setup.path, setup.memory_limit_bytes
    if setup.experts:
        return ExpertRunner(path, limit, report, setup.experts)
    if setup.task == "store caches":
        return CacheRunner(path, limit, report)
    if setup.task == "disk":
        return DiskRunner(path, limit, report)
    if setup.task == "kit":
        return KitRunner(path, limit, report)
    if setup.task == "train":
        return TrainingRunner(path, limit, report)
    if setup.images or setup.videos:
        images, videos = (list(map(str, files)) for files in (setup.images, setup.videos))
        runner: ModelRunner = VisionRunner(path, images, videos, limit, report)
    else:
        runner = ModelRunner(path, limit, report)
    runner.shortest_prompt, runner.reads_footprint = setup.shortest_prompt, setup.footprint
    return runner


def main() -> None:
    """Answer calls until the parent process ends."""
    # Only answers go to standard output; what libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        _raise_oom_score()
        forbid_repository_code()
        lock = threading.Lock()

        def send(**answer: Any) -> None:
            with lock:
                answers.write(json.dumps(answer) + "\n")

        messages = _messages()
        setup = decoded(next(messages), RunnerSetup)
        runner = _runner(setup, lambda figures: send(progress=figures))
        for message in messages:
            try:
                with refusals():
                    method = getattr(runner, message["call"])
                    result = method(**arguments_of(method, message["arguments"]))
                send(result=encoded(result))
            except MemfitError as error:
                send(error={"kind": type(error).__name__, "text": str(error)})


def _messages() -> Iterator[dict[str, Any]]:
    """Yield the parent's messages; when standard input closes, end even during a call."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def _raise_oom_score() -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_HIGHEST_OOM_SCORE)


if __name__ == "__main__":
    main()
