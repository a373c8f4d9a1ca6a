"""A child process with the model loaded, started again when it has died."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.probes.process import ModelProcess, ProbeStopped, Prompt

Answer = TypeVar("Answer")
_TRIES = 2  # of loading, when processes die of it one after another


class Worker:
    """Gives one loaded process at a time; whoever leaves its block leaves no process behind."""

    def __init__(self, start: Callable[[], ModelProcess]) -> None:
        """Take what makes a process that was not started."""
        self._make = start
        self._stack = ExitStack()
        self._process: ModelProcess | None = None
        self._asked: tuple[str | None, int | None] | None = None
        self._loaded: Loaded | None = None
        self._died_loading: list[ProbeStopped] = []

    def __enter__(self) -> "Worker":
        """Start nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self._end()

    @property
    def versions(self) -> dict[str, str]:
        """The process's mlx, mlx_lm, backend and device.

        Raises:
            MachineError: when MLX or mlx-lm is not installed.
        """
        return self._started().versions

    def prompt(self, text: str | None, tokens: int | None) -> Prompt:
        """Make the prompt, of this process and of every one after it.

        Raises:
            InputError: when there is no tokenizer for a text.
        """
        prompt = self._started().prompt(text, tokens)
        self._asked = (text, tokens)
        return prompt

    def load(self) -> Loaded:
        """Load the model where it is not loaded.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when mlx-lm has no class for the model.
            ProbeStopped: when the process did not live to load it; after two such processes in a
                row no other is started.
        """
        if len(self._died_loading) == _TRIES:
            raise self._died_loading[-1]
        process = self._started()
        if self._loaded is None:
            try:
                self._loaded = process.load()
            except ProbeStopped as error:
                self._died_loading.append(error)
                self._end()
                raise
            self._died_loading.clear()
        return self._loaded

    def run(self, workload: Workload, *, wired_limit_bytes: int | None = None) -> Run:
        """Run a workload once.

        Raises:
            ProbeStopped: when the process did not live to its end.
        """
        return self._alive(lambda p: p.run(workload, wired_limit_bytes=wired_limit_bytes))

    def swift_workspace(self, workload: Workload) -> int:
        """Return the workspace by mlx-swift-lm's rule.

        Raises:
            ProbeStopped: when the process did not live to tell it.
        """
        return self._alive(lambda p: p.swift_workspace(workload))

    def _alive(self, ask: Callable[[ModelProcess], Answer]) -> Answer:
        self.load()
        try:
            return ask(self._started())
        except ProbeStopped:
            self._end()
            raise

    def _started(self) -> ModelProcess:
        if self._process is None:
            process = self._stack.enter_context(self._make())
            if self._asked:
                process.prompt(*self._asked)
            self._process = process
        return self._process

    def _end(self) -> None:
        self._process = self._loaded = None
        self._stack.close()
