"""The process that loads and runs a model: `python -m memfit.probes.child`.

`ModelProcess` starts it. Each line of JSON on standard input is a call. The answers are lines of
JSON too: any number of {"progress"}, then one {"result"} or {"error"}.
"""

import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from msgspec import convert, to_builtins

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.recipe import Recipe
from memfit.estimators.base.workload import Workload
from memfit.probes.codeless import forbid_repository_code, refusals
from memfit.probes.experts.runner import ExpertRunner, ExpertSetup
from memfit.probes.model_runner import ModelRunner
from memfit.probes.prompt_caches.runner import CacheRunner
from memfit.probes.run_monitor import ReportFigures
from memfit.probes.vision_runner import VisionRunner

# When memory runs out, Linux ends this process first, not one of the user's: proc(5).
_HIGHEST_OOM_SCORE = "1000"


class Child:
    """Answers calls about one model."""

    calls: ClassVar[tuple[str, ...]] = (
        *("versions", "prompt", "load", "run", "swift_workspace", "train"),
    )

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def versions(self) -> dict[str, str]:
        """Return the versions, the backend and the device of this process."""
        import mlx.core as mx

        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        gpu = "metal" if mx.metal.is_available() else "cuda"
        return {
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "backend": gpu if on_gpu else "cpu",
            "device": str(mx.device_info().get("device_name", platform.machine())),
            **self._runner.versions(),
        }

    def prompt(self, text: str | None, tokens: int | None) -> dict[str, Any]:
        """Tokenise the prompt; the token ids stay in this process."""
        count, notes = self._runner.prompt(text, tokens)
        return {"tokens": count, "notes": notes}

    def load(self) -> dict[str, Any]:
        loaded: dict[str, Any] = to_builtins(self._runner.load())
        return loaded

    def run(self, workload: dict[str, Any], wired_limit_bytes: int | None) -> dict[str, Any]:
        """Generate once."""
        run: dict[str, Any] = to_builtins(self._runner.run(Workload(**workload), wired_limit_bytes))
        return run

    def swift_workspace(self, workload: dict[str, Any]) -> int:
        """Measure the workspace by the rule of mlx-swift-lm's tune."""
        return self._runner.swift_workspace(Workload(**workload))

    def train(self, recipe: dict[str, Any], tokens: int, updates: int) -> dict[str, Any]:
        """Train for a few steps, on batches of one length."""
        from memfit.probes.training_runner import train

        run = train(self._runner, convert(recipe, Recipe), tokens, updates)
        found: dict[str, Any] = to_builtins(run)
        return found


class ExpertChild(Child):
    """Answers calls about a model with a part of its experts."""

    calls = (
        "versions",
        "prompts",
        "choose",
        "load",
        "layers",
        "routing",
        "run",
        "agreement",
        "pack",
    )

    def __init__(self, runner: ExpertRunner) -> None:
        super().__init__(runner)
        for name in ("prompts", "choose", "layers", "routing", "agreement", "pack"):
            setattr(self, name, getattr(runner, name))


class CacheChild(Child):
    """Answers calls about the cache of a prompt."""

    calls = ("versions", "prompt", "load", "store", "restore", "replay")

    def __init__(self, runner: CacheRunner) -> None:
        super().__init__(runner)
        self.store, self.restore, self.replay = runner.store, runner.restore, runner.replay


def _child(setup: dict[str, Any], report: ReportFigures) -> Child:
    path, limit = Path(setup["path"]), setup["memory_limit_bytes"]
    if setup.get("experts") is not None:
        return ExpertChild(
            ExpertRunner(path, limit, report, convert(setup["experts"], ExpertSetup))
        )
    if setup.get("stores_caches"):
        return CacheChild(CacheRunner(path, limit, report))
    images, videos = setup.get("images"), setup.get("videos")
    if not (images or videos):
        runner = ModelRunner(path, limit, report)
        runner.shortest_prompt = setup.get("shortest_prompt")
        return Child(runner)
    return Child(VisionRunner(path, images or [], videos or [], limit, report))


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
        setup = next(messages)
        child = _child(setup, lambda figures: send(progress=figures))
        by_name: dict[str, Callable[..., Any]] = {
            name: getattr(child, name) for name in child.calls
        }
        for message in messages:
            try:
                with refusals():
                    result = by_name[message.pop("call")](**message)
                send(result=result)
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
