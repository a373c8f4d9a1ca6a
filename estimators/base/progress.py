"""Progress reports of the library, which never prints; the caller decides what to show."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct


class FinishedRequest(Struct, frozen=True):
    """One finished request; ``status`` is None when there was no response."""

    url: str  # without its query, which may hold a signature
    status: int | None
    nbytes: int  # read from the body
    seconds: float


class Progress(Protocol):
    """Receives reports about running work, from any thread."""

    def begin(self, what: str, steps: int) -> None:
        """Work with this number of steps begins."""

    def advance(self, steps: int = 1) -> None:
        """This number of steps is done."""

    def end(self) -> None:
        """The work has ended, complete or not."""

    def request(self, request: FinishedRequest) -> None:
        """A request has finished."""


class _NullProgress:
    """Ignores every report."""

    def begin(self, what: str, steps: int) -> None: ...
    def advance(self, steps: int = 1) -> None: ...
    def end(self) -> None: ...
    def request(self, request: FinishedRequest) -> None: ...


NULL_PROGRESS: Progress = _NullProgress()


@contextmanager
def reported(progress: Progress, what: str, steps: int) -> Iterator[None]:
    """Report the work of a block, which ends also where it fails."""
    progress.begin(what, steps)
    try:
        yield
    finally:
        progress.end()
