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
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Concatenate, Literal, ParamSpec, TypeVar, get_type_hints

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
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.probes.experts.runner import ExpertSetup
from memfit.probes.model_runner import ModelRunner, TokenizedPrompt

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


Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


class ProbeStopped(MachineError):  # noqa: N818 - names an event, as KeyboardInterrupt does
    """The measuring process ended, hung or ran out of memory."""

    def __init__(self, text: str, partial_figures: dict[str, int]) -> None:
        """Take the message, and the figures received before, by the names of `Run`'s fields."""
        super().__init__(text)
        self.partial_figures = partial_figures


class RunnerSetup(Struct, frozen=True, kw_only=True):
    """Which model a process runs, and how."""

    path: Path
    memory_limit_bytes: int | None = None
    images: tuple[Path, ...] = ()
    videos: tuple[Path, ...] = ()
    """With images, or folders of videos, mlx-vlm runs the model."""
    shortest_prompt: int | None = None
    """Tokens of a batch's shortest prompt."""
    footprint: bool = False
    """Whether what macOS charges the process for is read."""
    experts: ExpertSetup | None = None
    """The experts that are in memory; None runs the model as mlx-lm does."""
    task: Literal["generate", "store caches", "train", "kit", "disk"] = "generate"
    """What it does apart from experts, by the runner that can."""


class ModelProcess:
    """A context manager around one process; after the block the process is gone."""

    def __init__(self, path: Path, *, timeout_seconds: float, **settings: Any) -> None:
        """Take the model's directory, and the other fields of `RunnerSetup`.

        ``timeout_seconds`` is the longest time without a message. The process sends one after
        each call and each chunk of a prompt, each second of decode, and each second in which it
        read weights.
        """
        self._setup, self.timeout_seconds = RunnerSetup(path=path, **settings), timeout_seconds
        self._process: subprocess.Popen[str] | None = None
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._stderr: IO[bytes] | None = None
        self.versions: dict[str, str] = {}  # "mlx", "mlx_lm", "mlx_vlm", "backend", "device"

    def __enter__(self) -> "ModelProcess":
        """Start the process.

        Raises:
            MachineError: when MLX or mlx-lm is not installed, or mlx-vlm for an image, or when
                Python cannot be started.
            CheckpointError: when an image does not exist.
        """
        setup = self._setup
        require_installed(has_image=bool(setup.images or setup.videos))
        for image in setup.images:
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
            self._send(encoded(setup))
            self.versions = self.call(ModelRunner.versions)
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
        return self.call(ModelRunner.prompt, text, tokens)

    def load(self) -> Loaded:
        """Load the model.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when mlx-lm has no class for the model, or it brings its own code.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        return self.call(ModelRunner.load)

    def run(self, workload: Workload, *, wired_limit_bytes: int | None = None) -> Run:
        """Generate once with mlx-lm's loop, or its batch generator for several sequences.

        The prompt is cut or repeated to the workload's tokens. The wired limit is set during
        the run only.

        Raises:
            UnsupportedError: when the model's class fails, e.g. on KV bits of a rotating cache, or
                mlx-lm cannot batch its caches.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        return self.call(ModelRunner.run, workload, wired_limit_bytes)

    def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Return what a method of the runner returns in the process.

        Raises:
            MemfitError: as the method; its figures are those received before.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        name = method.__name__
        self._send({"call": name, "arguments": encoded(bound(method, *arguments, **named))})
        figures: dict[str, int] = {}
        while True:
            answer = self._next_answer(name, figures)
            if "result" in answer:
                result: Answer = answer_of(method, answer["result"])
                return result
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
        return f"{verbs.get(call, 'running')} {printable(self._setup.path)}"

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
        text, tail = ending(code), self._stderr_tail()
        return f"{text}: {tail}" if tail and (code >= 0 or -code == signal.SIGABRT) else text

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


def ending(code: int) -> str:
    """Return how a process with this exit code ended, with the likely reason."""
    if code >= 0:
        return f"exited with {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    likely = f", {_LIKELY_REASONS[name]}" if name in _LIKELY_REASONS else ""
    return f"killed by signal {-code} ({name}){likely}"


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


# How arguments and answers cross, as JSON: both sides read the types from the annotations of the
# method.


def encoded(value: Any) -> Any:
    """Return a value as JSON can hold it; a path is absolute, for a process in any directory."""
    return to_builtins(value, enc_hook=_path_text)


def decoded(value: Any, kind: Any) -> Any:
    """Return the value of a type that `encoded` made this of."""
    return convert(value, kind, dec_hook=lambda known, text: known(text))


def bound(method: Callable[..., Any], *arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, without ``self``."""
    _, *given = signature(method).bind(None, *arguments, **named).arguments.items()
    return dict(given)


def arguments_of(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `encoded` made these of."""
    kinds = get_type_hints(method)
    return {name: decoded(value, kinds[name]) for name, value in given.items()}


def answer_of(method: Callable[..., Any], answer: Any) -> Any:
    """Return the answer that `encoded` made this of."""
    return decoded(answer, get_type_hints(method)["return"])


def _path_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    raise NotImplementedError(type(value))
