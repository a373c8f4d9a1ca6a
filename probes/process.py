"""A model in a process of its own: whatever becomes of that process, the caller lives on.

    with ModelProcess(path, timeout_seconds=600) as process:
        process.prompt(None, 2048)
        process.load()
        run = process.run(Workload(prompt_tokens=2048, max_tokens=32))

A process that has stopped stays so: a new one is a new ModelProcess.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, Any, NamedTuple

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

# Errors of the model or the request; any other is of this machine.
_ERRORS: dict[str, type[MemfitError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, InputError, UnsupportedError)
}
# The model is a directory here, so nothing is looked up elsewhere; and no module of the working
# directory, which may be the model's, is imported in place of a library.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
_COMMAND = (sys.executable, "-m", "memfit.probes.child")
_LAST_WORDS_BYTES = 4096
_LIKELY_REASONS = {
    "SIGKILL": "probably for want of memory",
    "SIGSEGV": "as MLX's CPU backend does when it is refused memory",
    "SIGABRT": "as MLX does when the GPU runs out of memory",
}


class ProbeStopped(MachineError):  # noqa: N818 - as KeyboardInterrupt, it is what happened
    """The measuring process ended, hung or ran out of memory.

    ``reached`` holds the figures that arrived before, by the names of `Run`'s fields.
    """

    def __init__(self, text: str, reached: dict[str, int]) -> None:
        """Take the message and the figures."""
        super().__init__(text)
        self.reached = reached


class Prompt(NamedTuple):
    """A prompt's tokens, and what was done otherwise than asked."""

    tokens: int
    notes: tuple[str, ...]


class ModelProcess:
    """A context manager around the one process; nothing of it is left after the block."""

    def __init__(
        self,
        path: Path,
        *,
        memory_limit_bytes: int | None = None,
        timeout_seconds: float,
        image: Path | None = None,
    ) -> None:
        """Take the model's directory; ``timeout_seconds`` is the longest silence of the process.

        With ``image`` mlx-vlm runs the model, and the prompt is a text about it.
        It speaks when a call is done, at every chunk of a prompt, each second of decode, and
        each second in which weights were read.
        """
        self._path, self.timeout_seconds = path, timeout_seconds
        self._image, self._limit = image, memory_limit_bytes
        self._codeless: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._stderr: IO[bytes] | None = None
        self.versions: dict[str, str] = {}  # "mlx", "mlx_lm", "mlx_vlm", "backend", "device"

    def __enter__(self) -> "ModelProcess":
        """Start the process.

        Raises:
            MachineError: when MLX or mlx-lm is not installed, or mlx-vlm for an image, or Python
                cannot be started.
            CheckpointError: when there is no such image.
        """
        require_installed(has_image=self._image is not None)
        if self._image:
            regular_file_bytes(self._image)
        self._stderr = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, **_ENVIRONMENT},
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is this process's to handle
            )
        except OSError as error:
            raise MachineError(f"{_COMMAND[0]} cannot be started: {error.strerror}") from None
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        try:
            self._send(self._opening())
            self.versions = self._ask("versions")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill the process, whatever it does."""
        if self._process:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                _close(pipe)
        _close(self._stderr)
        if self._codeless:
            self._codeless.cleanup()

    @property
    def pid(self) -> int | None:
        """The process's id, None before it is started."""
        return self._process.pid if self._process else None

    def prompt(self, text: str | None, tokens: int | None) -> Prompt:
        """Tokenise a text as mlx_lm.generate would, or as many tokens of any text.

        Raises:
            InputError: when the text is empty, or there is no tokenizer that can be loaded.
        """
        answer = self._ask("prompt", text=text, tokens=tokens)
        return Prompt(answer["tokens"], tuple(answer["notes"]))

    def load(self) -> Loaded:
        """Load the model.

        Raises:
            CheckpointError: when the weights are not those that the config describes.
            UnsupportedError: when mlx-lm has no class for the model, or it brings its own code.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        return Loaded(**self._ask("load"))

    def run(self, workload: Workload, *, wired_limit_bytes: int | None = None) -> Run:
        """Generate once by mlx-lm's loop, from the prompt cut or repeated to the workload's tokens.

        The wired limit holds during the run.

        Raises:
            InputError: for a batch: mlx-lm's loop generates one sequence.
            UnsupportedError: when the model's class fails, e.g. on KV bits of a rotating cache.
            ProbeStopped: when the process ends, hangs or runs out of memory.
        """
        if workload.batch != 1:
            raise InputError(
                f"batch {workload.batch}: mlx-lm's generation loop, which is measured, takes one"
                " sequence"
            )
        if wired_limit_bytes is not None and self.versions["backend"] != "metal":
            raise MachineError("a wired limit can be set on Metal only")
        answer = self._ask("run", workload=asdict(workload), wired_limit_bytes=wired_limit_bytes)
        return Run(**answer)

    def swift_workspace(self, workload: Workload) -> int:
        """Return the workspace by the rule of mlx-swift-lm's tune, in bytes.

        The last chunk's logits are evaluated, and caches count their tokens, not their buffers.

        Raises:
            UnsupportedError: as `run`.
            ProbeStopped: as `run`.
        """
        answer: int = self._ask("swift_workspace", workload=asdict(workload))
        return answer

    def _opening(self) -> dict[str, Any]:
        path = self._path
        if self._image:
            self._codeless = tempfile.TemporaryDirectory(prefix="memfit-")
            path = _without_code(path, Path(self._codeless.name))
        image = str(self._image.absolute()) if self._image else None
        return {"path": str(path), "image": image, "memory_limit_bytes": self._limit}

    def _ask(self, call: str, **arguments: Any) -> Any:
        """Return the answer to a call; figures on the way are kept for the error."""
        self._send({"call": call, **arguments})
        reached: dict[str, int] = {}
        while True:
            answer = self._next_answer(call, reached)
            if "result" in answer:
                return answer["result"]
            if error := answer.get("error"):
                kind = _ERRORS.get(error["kind"])
                raise kind(error["text"]) if kind else ProbeStopped(error["text"], reached)
            reached.update(answer["progress"])

    def _send(self, request: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise MachineError("the measuring process was not started")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: how is said where its answer is waited for

    def _next_answer(self, call: str, reached: dict[str, int]) -> Any:
        try:
            line = self._answers.get(timeout=self.timeout_seconds)
        except Empty:
            self._kill()
            silence = f"no sign of life for {self.timeout_seconds:g} s"
            text = f"{self._doing(call)}: {silence}, stopped; a slow model needs a longer timeout"
            raise ProbeStopped(text, reached) from None
        if not line:
            raise ProbeStopped(f"{self._doing(call)}: {self._end()}", reached)
        return json.loads(line)

    def _doing(self, call: str) -> str:
        words = {"load": "loading", "prompt": "tokenising for", "versions": "starting for"}
        return f"{words.get(call, 'running')} {printable(self._path)}"

    def _read(self, process: "subprocess.Popen[str]") -> None:
        try:
            for line in process.stdout or ():
                self._answers.put(line)
        except ValueError:
            pass  # closed at the end of the block
        self._answers.put("")

    def _end(self) -> str:
        """Say how the process ended."""
        self._answers.put("")  # for whoever asks again
        code = self._process.wait() if self._process else 0
        last_words = self._last_words()
        if code >= 0:
            return f"exited with {code}" + (f": {last_words}" if last_words else "")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        text = f"killed by signal {-code} ({name})"
        if reason := _LIKELY_REASONS.get(name):
            text += f", {reason}"
        return f"{text}: {last_words}" if last_words and -code == signal.SIGABRT else text

    def _last_words(self) -> str:
        if self._stderr is None:
            return ""
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _LAST_WORDS_BYTES))
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")

    def _kill(self) -> None:
        if self._process:
            self._process.kill()


def require_installed(*, has_image: bool) -> None:
    """Hold what is installed against what runs a model.

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


def _without_code(path: Path, links: Path) -> Path:
    """Return a directory of links to a model's files but not to its programs.

    Some of mlx-vlm's processors run them, whatever they are told.
    """
    view = links / path.absolute().name
    view.mkdir()
    for file in path.absolute().iterdir():
        if file.suffix != ".py" and file.is_file():
            (view / file.name).symlink_to(file)
    return view


def _close(pipe: IO[Any] | None) -> None:
    try:
        if pipe:
            pipe.close()
    except OSError:
        pass  # what was not yet sent to a process that is gone
