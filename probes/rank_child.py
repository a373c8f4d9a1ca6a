"""One rank of a measured run: `python -m memfit.probes.rank_child SETUP`, as mlx.launch starts it.

Every rank loads with mlx-lm's own sharded_load and runs mlx-lm's own loop. Its messages are lines
of JSON on standard output, each with the number of the rank: mlx.launch passes on what all print.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from memfit.estimators.base.errors import CheckpointError, MachineError, MemfitError
from memfit.estimators.base.files import printable
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.model_builder import class_errors
from memfit.probes.loading import codeless_config, memory_errors, weight_errors
from memfit.probes.model_runner import ModelRunner
from memfit.probes.run_monitor import ReportFigures

_ALIVE_EVERY_SECONDS = 0.5


class RankRunner(ModelRunner):
    """Measures the part of one rank."""

    def __init__(self, path: Path, setup: dict[str, Any], group: Any, report: ReportFigures):
        super().__init__(path, setup["memory_limit_bytes"], report)
        self._group = group
        self._parallel, self._split = setup["parallel"], setup["split"]

    def load_model(self) -> tuple[Any, dict[str, Any]]:
        """Return the rank's part of the model, and the config."""
        config = codeless_config(self.path)
        from mlx_lm import utils

        groups = {f"{self._parallel}_group": self._group}
        # A run needs no tokenizer, and some bring their own code.
        stubs = {
            "load_tokenizer": lambda *_, **__: None,
            "load_model": partial(_split_load, utils.load_model, self._split),
        }
        name = printable(self.path / CONFIG)
        with (
            class_errors(name, config),
            weight_errors(self.path),
            memory_errors(),
            changed(utils, stubs),
        ):
            model, _ = utils.sharded_load(str(self.path), **groups)
        return model, config


def _split_load(load: Any, split: list[int] | None, *args: Any, **options: Any) -> Any:
    """Return what mlx-lm's load_model does, with a pipeline that splits the layers as told."""
    model, config = load(*args, **options)
    if split:
        inner = model.model
        inner.pipeline = partial(inner.pipeline, split=split)
    return model, config


def main() -> None:
    """Load, run once, report, and end."""
    setup = json.loads(sys.argv[1])
    rank = int(os.environ.get("MLX_RANK", "0"))
    # Only messages go to standard output; what libraries print goes to standard error.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(**message: Any) -> None:
        with lock:
            messages.write(json.dumps({"rank": rank, **message}) + "\n")

    _end_with_launcher()
    with _alive(send):
        try:
            _measure(setup, send)
        except MemfitError as error:
            send(error={"kind": type(error).__name__, "text": str(error)[:2000]})
            messages.flush()
            os.kill(os.getpid(), signal.SIGTERM)  # the ring's threads wait for the other ranks


def _measure(setup: dict[str, Any], send: Any) -> None:
    import mlx.core as mx

    send(stage="starting", pid=os.getpid())
    path = Path(setup["path"])
    if not path.is_dir():
        raise CheckpointError(f"{printable(path)}: no such directory on this host")
    try:
        group = mx.distributed.init(strict=True, backend="ring")
    except RuntimeError as error:
        raise MachineError(f"it cannot connect: {printable(str(error))}") from None
    send(stage="connected")
    runner = RankRunner(path, setup, group, lambda figures: send(progress=figures))
    workload = Workload(**setup["workload"])
    runner.prompt(None, workload.prompt_tokens)
    loaded = runner.load()
    send(loaded=to_builtins(loaded))
    run = runner.run(workload, None)
    send(run=to_builtins(run))


@contextmanager
def _alive(send: Any) -> Iterator[None]:
    """Say that the process is alive; a stopped one does not, one that waits for others does."""
    finished = threading.Event()

    def beat() -> None:
        while not finished.wait(_ALIVE_EVERY_SECONDS):
            send(alive=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _end_with_launcher() -> None:
    """End when mlx.launch does, also during a call: it holds the other end of standard input."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
