"""Run a model in a separate process, so that a crash there does not end the caller.

    with ModelProcess(path, timeout_seconds=600) as process:
        process.prompt(None, 2048)
        process.load()
        run = process.run(Workload(prompt_tokens=2048, max_tokens=32))

A process that has stopped is not started again; make a new ModelProcess.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple, TypeVar

from msgspec import Struct, convert, to_builtins

from memfit.estimators.base.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    MachineError,
    MemfitError,
    UnsupportedError,
)
from memfit.estimators.base.files import printable, regular_file_bytes
from memfit.estimators.base.quantities import Bytes, Count
from memfit.estimators.base.recipe import Recipe
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Loaded, Run

# Errors of the model or the input; any other error is about this machine.
_ERRORS: dict[str, type[MemfitError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, InputError, UnsupportedError)
}
# The model is a local directory, so nothing is fetched from the Hub. PYTHONSAFEPATH: the working
# directory may be the model's, and no module in it may replace a library.
CHILD_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
_COMMAND = (sys.executable, "-m", "memfit.probes.child")
_STDERR_TAIL_BYTES = 4096
_LIKELY_REASONS = {
    "SIGKILL": "probably because memory ran out",
    "SIGSEGV": "as MLX's CPU backend does when it gets no memory",
    "SIGABRT": "as MLX does when the GPU runs out of memory",
}


Process = TypeVar("Process", bound="ModelProcess")


class ProbeStopped(MachineError):  # noqa: N818 - names an event, as KeyboardInterrupt does
    """The measuring process ended, hung or ran out of memory."""

    def __init__(self, text: str, partial_figures: dict[str, int]) -> None:
        """Take the message, and the figures received before, by the names of `Run`'s fields."""
        super().__init__(text)
        self.partial_figures = partial_figures


class TokenizedPrompt(NamedTuple):
    """A prompt that the measuring process holds."""

    tokens: int
    notes: tuple[str, ...]
    """What was done differently from the request."""


class TrainingRun(Struct, frozen=True, kw_only=True):
    """The largest moment of each part of a training run, by mx.get_peak_memory()."""

    validation_bytes: Bytes
    first_step_bytes: Bytes
    """Until the first update of the optimizer."""
    later_steps_bytes: Bytes
    steps: Count


class ModelProcess:
    """A context manager around one process; after the block the process is gone."""

    def __init__(
        self,
        path: Path,
        *,
        memory_limit_bytes: int | None = None,
        timeout_seconds: float,
        images: tuple[Path, ...] = (),
        videos: tuple[Path, ...] = (),
        shortest_prompt: int | None = None,
    ) -> None:
        """Take the model's directory; with images, or folders of ``videos``, mlx-vlm runs it.

        ``timeout_seconds`` is the longest time without a message. The process sends one after
        each call and each chunk of a prompt, each second of decode, and each second in which it
        read weights.
        """
        self._path, self.timeout_seconds = path, timeout_seconds
        self._images, self._videos, self._limit = images, videos, memory_limit_bytes
        self._shortest_prompt = shortest_prompt
        self._process: subprocess.Popen[str] | None = None
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._stderr: IO[bytes] | None = None
        self.versions: dict[str, str] = {}  # "mlx", "mlx_lm", "mlx_vlm", "backend", "device"

    def __enter__(self: Process) -> Process:
        """Start the process.

        Raises:
            MachineError: when MLX or mlx-lm is not installed, or mlx-vlm for an image, or when
                Python cannot be started.
            CheckpointError: when an image does not exist.
        """
        require_installed(has_image=bool(self._images or self._videos))
        for image in self._images:
            regular_file_bytes(image)
        self._stderr = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, **CHILD_ENVIRONMENT},
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the other
            )
        except OSError as error:
            raise MachineError(f"{_COMMAND[0]} cannot be started: {error.strerror}") from None
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        try:
            self._send(self._setup())
            self.versions = self._call("versions")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process."""
        if self._process:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                _close(pipe)
        _close(self._stderr)

    @property
    def pid(self) -> int | None:
        """The id of the process, None before it is started."""
        return self._process.pid if self._process else None

    def prompt(self, text: str | None, tokens: int | None) -> TokenizedPrompt:
        """Tokenise ``text`` as mlx_lm.generate would, or make a prompt of ``tokens`` tokens.

        Raises:
            InputError: when the text is empty, or no tokenizer can be loaded.
        """
        answer = self._call("prompt", text=text, tokens=tokens)
        return TokenizedPrompt(answer["tokens"], tuple(answer["notes"]))

    def load(self) -> Loaded:
        """Load the model.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when mlx-lm has no class for the model, or it brings its own code.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        return Loaded(**self._call("load"))

    def run(self, workload: Workload, *, wired_limit_bytes: int | None = None) -> Run:
        """Generate once with mlx-lm's loop, or its batch generator for several sequences.

        The prompt is cut or repeated to the workload's tokens. The wired limit is set during
        the run only.

        Raises:
            UnsupportedError: when the model's class fails, e.g. on KV bits of a rotating cache, or
                mlx-lm cannot batch its caches.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        if wired_limit_bytes is not None and self.versions["backend"] != "metal":
            raise MachineError("a wired limit can be set on Metal only")
        answer = self._call(
            "run", workload=to_builtins(workload), wired_limit_bytes=wired_limit_bytes
        )
        return Run(**answer)

    def train(self, recipe: Recipe, tokens: int, updates: int) -> TrainingRun:
        """Train on batches of ``tokens`` tokens, for some updates after the first one.

        Raises:
            UnsupportedError: when mlx-lm cannot train the class.
            ProbeStopped: as `run`.
        """
        answer = self._call("train", recipe=to_builtins(recipe), tokens=tokens, updates=updates)
        return convert(answer, TrainingRun)

    def swift_workspace(self, workload: Workload) -> int:
        """Return the workspace by the rule of mlx-swift-lm's tune, in bytes.

        The logits of the last chunk are evaluated, and caches count their tokens, not their
        buffers.

        Raises:
            UnsupportedError: as `run`.
            ProbeStopped: as `run`.
        """
        answer: int = self._call("swift_workspace", workload=to_builtins(workload))
        return answer

    def _setup(self) -> dict[str, Any]:
        return {
            "path": str(self._path),
            "images": [str(image.absolute()) for image in self._images],
            "videos": [str(video.absolute()) for video in self._videos],
            "memory_limit_bytes": self._limit,
            "shortest_prompt": self._shortest_prompt,
        }

    def _call(self, name: str, **arguments: Any) -> Any:
        """Return the result of a call; an error carries the figures received during it."""
        self._send({"call": name, **arguments})
        figures: dict[str, int] = {}
        while True:
            answer = self._next_answer(name, figures)
            if "result" in answer:
                return answer["result"]
            if error := answer.get("error"):
                kind = _ERRORS.get(error["kind"])
                raise kind(error["text"]) if kind else ProbeStopped(error["text"], figures)
            figures.update(answer["progress"])

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise MachineError("the measuring process was not started")
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has ended; waiting for its answer reports how

    def _next_answer(self, call: str, figures: dict[str, int]) -> Any:
        try:
            line = self._answers.get(timeout=self.timeout_seconds)
        except Empty:
            self._kill()
            text = (
                f"{self._activity(call)}: no progress for {self.timeout_seconds:g} s, stopped;"
                " a slow model needs a longer timeout"
            )
            raise ProbeStopped(text, figures) from None
        if not line:
            raise ProbeStopped(f"{self._activity(call)}: {self._exit_reason()}", figures)
        return json.loads(line)

    def _activity(self, call: str) -> str:
        verbs = {"load": "loading", "prompt": "tokenising for", "versions": "starting for"}
        return f"{verbs.get(call, 'running')} {printable(self._path)}"

    def _read(self, process: "subprocess.Popen[str]") -> None:
        try:
            for line in process.stdout or ():
                self._answers.put(line)
        except ValueError:
            pass  # the pipe was closed at the end of the block
        self._answers.put("")

    def _exit_reason(self) -> str:
        """Return how the process ended, as text for a message."""
        self._answers.put("")  # so that the next call also sees the end
        code = self._process.wait() if self._process else 0
        stderr_tail = self._stderr_tail()
        if code >= 0:
            return f"exited with {code}" + (f": {stderr_tail}" if stderr_tail else "")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        text = f"killed by signal {-code} ({name})"
        if reason := _LIKELY_REASONS.get(name):
            text += f", {reason}"
        return f"{text}: {stderr_tail}" if stderr_tail and -code == signal.SIGABRT else text

    def _stderr_tail(self) -> str:
        if self._stderr is None:
            return ""
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _STDERR_TAIL_BYTES))
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")

    def _kill(self) -> None:
        if self._process:
            self._process.kill()


def require_installed(*, has_image: bool) -> None:
    """Check that the libraries that run a model are installed.

    Raises:
        MachineError: when MLX or mlx-lm is not installed, or mlx-vlm for an image.
    """
    _require_installed(["mlx", "mlx_lm"], "measuring", "memfit[mlx]")
    if has_image:
        _require_installed(["mlx_vlm"], "an image", "memfit[vlm]")


def _require_installed(packages: list[str], what: str, extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"{what} needs {' and '.join(missing)}, not installed here: install {extra}"
        )


def _close(pipe: IO[Any] | None) -> None:
    try:
        if pipe:
            pipe.close()
    except OSError:
        pass  # unsent data for a process that has ended
