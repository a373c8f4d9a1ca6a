"""What every command that runs a model does: find its directory, and catch interrupts."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from memfit.cli.exits import CommandStopped, Exit
from memfit.cli.options.run import RunOptions
from memfit.cli.progress import reporting
from memfit.estimators.base.progress import Progress
from memfit.estimators.checkpoint.manifest import Checkpoint


class LocalModel(NamedTuple):
    """A model that can be loaded here."""

    checkpoint: Checkpoint
    path: Path
    progress: Progress
    """Shows the work on it."""


@contextmanager
def measuring(
    model: str, run: RunOptions, *, verbose: bool, check: Callable[[Checkpoint], None] | None = None
) -> Iterator[LocalModel]:
    """Yield a model, downloaded after ``check`` accepted its headers where an option allows it.

    Inside, a refusal that --force overrides names that option, and an interrupt becomes a message.
    """
    before_download = (check or _require_installed) if run.download else None
    from memfit.probes.download import local_model

    with reporting(verbose=verbose) as progress, _naming_force(), interruptible():
        local = local_model(model, before_download=before_download, progress=progress)
        yield LocalModel(*local, progress)


def _require_installed(_checkpoint: Checkpoint) -> None:
    from memfit.probes.process import require_installed

    require_installed(has_image=False)


@contextmanager
def _naming_force() -> Iterator[None]:
    """Add the name of the option that overrides an error; the library knows no options."""
    from memfit.probes.preflight import RefusedError, TooLongError

    try:
        yield
    except (RefusedError, TooLongError) as error:
        raise type(error)(f"{error}; --force runs it anyway") from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn an interrupt into a message that says what is saved; Typer prints none.

    SIGTERM is handled as Ctrl-C, so that every block can end its process.
    """
    terminated = False

    def terminate(_number: int, _frame: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        code = Exit.TERMINATED if terminated else Exit.INTERRUPTED
        raise CommandStopped(str(stop) or "interrupted", code) from None
    finally:
        signal.signal(signal.SIGTERM, before)
