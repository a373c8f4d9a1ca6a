"""One rank of a measured run: `python -m memfit.probes.rank_child SETUP`, as mlx.launch starts it.

Every rank loads with mlx-lm's own sharded_load and runs mlx-lm's own loop. Its messages are lines
of JSON on standard output: mlx.launch passes on what all print.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from msgspec.json import encode
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, MachineError, MemfitError
from memfit.estimators.base.files import printable
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.model_builder import class_errors
from memfit.probes.codeless import forbid_repository_code, refusals
from memfit.probes.loading import codeless_config, memory_errors, one_line, weight_errors
from memfit.probes.model_runner import ModelRunner
from memfit.probes.rank_run import RankError, RankState
from memfit.probes.run_monitor import ReportFigures, repeated

_SEND_EVERY_SECONDS = 0.5


class RankRunner(ModelRunner):
    """Measures the part of one rank."""

    def __init__(self, path: Path, setup: dict[str, Any], group: Any, report: ReportFigures):
        super().__init__(path, setup["memory_limit_bytes"], report)
        self._group = group
        self._parallel, self._split = setup["parallel"], setup["split"]

    def load_model(self) -> tuple[Any, dict[str, Any]]:
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
    """Return what mlx-lm's load_model does, with a pipeline that takes a split."""
    model, config = load(*args, **options)
    if split:
        inner = model.model
        inner.pipeline = partial(inner.pipeline, split=split)
    return model, config


class _Sender:
    """Sends the state of this rank, whenever it changes and in between as a sign of life."""

    def __init__(self, messages: IO[bytes]) -> None:
        rank = int(os.environ.get("MLX_RANK", "0"))
        self._state = RankState(rank=rank, pid=os.getpid())
        self._messages, self._lock = messages, threading.Lock()
        self.send()

    def send(self) -> None:
        # A line of its own, whatever a library has printed before.
        with self._lock:
            self._messages.write(b"\n" + encode(self._state) + b"\n")
            self._messages.flush()

    def update(self, **changes: Any) -> None:
        self._state = replace(self._state, steps=self._state.steps + 1, **changes)
        self.send()


def main() -> None:
    """Load, run once, and report until the launcher ends."""
    setup = json.loads(sys.argv[1])
    # Only messages go to standard output; what libraries print goes to standard error.
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _end_with_launcher()
    sender = _Sender(messages)
    with repeated(sender.send, _SEND_EVERY_SECONDS):
        try:
            with refusals():
                forbid_repository_code()  # here, because it imports for seconds
                _measure(setup, sender)
        except MemfitError as error:
            sender.update(error=RankError(type(error).__name__, str(error)[:2000]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is over
            text = f"{type(error).__name__}: {one_line(error)}"
            sender.update(error=RankError("MachineError", text[:2000]))
        threading.Event().wait()


def _measure(setup: dict[str, Any], sender: _Sender) -> None:
    path = Path(setup["path"])
    if not path.is_dir():
        raise CheckpointError(f"{printable(path)}: no such directory on this host")
    import mlx.core as mx

    try:
        group = mx.distributed.init(strict=True, backend="ring")
    except RuntimeError as error:
        raise MachineError(f"it cannot connect: {one_line(error)}") from None
    sender.update(connected=True)
    runner = RankRunner(path, setup, group, lambda _: sender.update())
    workload = Workload(**setup["workload"])
    runner.prompt(None, workload.prompt_tokens)
    sender.update(loaded=runner.load())
    sender.update(run=runner.run(workload, None))


def _end_with_launcher() -> None:
    """End when mlx.launch does, also during a call: it holds the other end of standard input.

    MLX holds Python's lock while it connects. Over ssh the end of the terminal is a signal, which
    needs no lock; a launcher that nohup started would have it ignored.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def wait() -> None:
        with suppress(OSError):  # of a terminal without an other end
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
