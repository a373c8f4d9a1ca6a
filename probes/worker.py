"""A child process that holds the loaded model, and is started again after it died."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Concatenate

from memfit.estimators.runtimes.measurement import Loaded
from memfit.probes.model_runner import TokenizedPrompt
from memfit.probes.process import Answer, Arguments, ModelProcess, ProbeStopped

_MAX_FAILED_LOADS = 2  # in a row; then no other process is started


class Worker:
    """A context manager around one loaded process at a time; after the block none is left."""

    def __init__(self, start: Callable[[], ModelProcess]) -> None:
        """Take a function that makes a process, not started yet."""
        self._make = start
        self._stack = ExitStack()
        self._process: ModelProcess | None = None
        self._prompt_arguments: tuple[str | None, int | None] | None = None
        self._loaded: Loaded | None = None
        self._failed_loads: list[ProbeStopped] = []

    def __enter__(self) -> "Worker":
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._end()

    @property
    def versions(self) -> dict[str, str]:
        """The process's versions of mlx and mlx_lm, its backend and its device.

        Raises:
            MachineError: when MLX or mlx-lm is not installed.
        """
        return self._started().versions

    def prompt(self, text: str | None, tokens: int | None) -> TokenizedPrompt:
        """Make the prompt in this process and in every later one.

        Raises:
            InputError: when there is no tokenizer for a text.
        """
        prompt = self._started().prompt(text, tokens)
        self._prompt_arguments = (text, tokens)
        return prompt

    def load(self) -> Loaded:
        """Load the model if it is not loaded.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when mlx-lm has no class for the model.
            ProbeStopped: when the process died while loading; after two such processes in a row
                no other is started.
        """
        if len(self._failed_loads) == _MAX_FAILED_LOADS:
            raise self._failed_loads[-1]
        process = self._started()
        if self._loaded is None:
            try:
                self._loaded = process.load()
            except ProbeStopped as error:
                self._failed_loads.append(error)
                self._end()
                raise
            self._failed_loads.clear()
        return self._loaded

    def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Return what a method of the runner returns, with the model loaded.

        Raises:
            ProbeStopped: when the process died during the call.
        """
        self.load()
        try:
            return self._started().call(method, *arguments, **named)
        except ProbeStopped:
            self._end()
            raise

    def _started(self) -> ModelProcess:
        if self._process is None:
            process = self._stack.enter_context(self._make())
            if self._prompt_arguments:
                process.prompt(*self._prompt_arguments)
            self._process = process
        return self._process

    def _end(self) -> None:
        self._process = self._loaded = None
        self._stack.close()
