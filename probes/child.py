"""The process that holds a model: `python -m memfit.probes.child`, started by ModelProcess.

A line of JSON in is a request, one out an answer: {"progress"}, then {"result"} or {"error"}.
"""

import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import Workload
from memfit.probes.measuring import Bench
from memfit.probes.run_monitor import Report
from memfit.probes.vision_runner import VisionBench

# The first whose memory runs out is this process, not one of the user's: Linux proc(5).
_KILL_ME_FIRST = "1000"


class Child:
    """Answers requests about one model."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def versions(self) -> dict[str, str]:
        """Return what runs here."""
        import mlx.core as mx

        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        gpu = "metal" if mx.metal.is_available() else "cuda"
        return {
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "backend": gpu if on_gpu else "cpu",
            "device": str(mx.device_info().get("device_name", platform.machine())),
            **self._bench.versions(),
        }

    def prompt(self, text: str | None, tokens: int | None) -> dict[str, Any]:
        """Tokenise; the ids stay here."""
        count, notes = self._bench.prompt(text, tokens)
        return {"tokens": count, "notes": notes}

    def load(self) -> dict[str, Any]:
        """Load the model."""
        return asdict(self._bench.load())

    def run(self, workload: dict[str, Any], wired_limit_bytes: int | None) -> dict[str, Any]:
        """Generate once."""
        return asdict(self._bench.run(Workload(**workload), wired_limit_bytes))

    def swift_workspace(self, workload: dict[str, Any]) -> int:
        """Measure by the rule of mlx-swift-lm's tune."""
        return self._bench.swift_workspace(Workload(**workload))


def _bench(opening: dict[str, Any], report: Report) -> Bench:
    path, limit = Path(opening["path"]), opening["memory_limit_bytes"]
    if opening["image"] is None:
        return Bench(path, limit, report)
    return VisionBench(path, Path(opening["image"]), limit, report)


def main() -> None:
    """Answer until the other side is gone."""
    # What libraries print goes to standard error; answers alone go out.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        _offer_to_be_killed()

        one_at_a_time = threading.Lock()

        def say(**answer: Any) -> None:
            with one_at_a_time:
                answers.write(json.dumps(answer) + "\n")

        requests = _requests()
        child = Child(_bench(next(requests), lambda figures: say(progress=figures)))
        calls = (child.versions, child.prompt, child.load, child.run, child.swift_workspace)
        by_name: dict[str, Callable[..., Any]] = {call.__name__: call for call in calls}
        for request in requests:
            try:
                say(result=by_name[request.pop("call")](**request))
            except MemfitError as error:
                say(error={"kind": type(error).__name__, "text": str(error)})


def _requests() -> Iterator[dict[str, Any]]:
    """Yield requests; when no more can come, this process ends, even in the middle of one."""
    waiting: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(line)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(waiting.get())


def _offer_to_be_killed() -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILL_ME_FIRST)


if __name__ == "__main__":
    main()
