"""Where the library tells what it is doing; it never prints, and says nothing when not asked."""

from typing import NamedTuple, Protocol


class Request(NamedTuple):
    """One request as it went: ``status`` is None when no answer came."""

    url: str  # without its query, which may hold a signature
    status: int | None
    nbytes: int  # of the body, as far as it was read
    seconds: float


class Progress(Protocol):
    """Takes reports of work under way, from any thread."""

    def begin(self, what: str, steps: int) -> None:
        """Work of that many steps begins."""

    def advance(self, steps: int = 1) -> None:
        """So many steps are done."""

    def end(self) -> None:
        """The work is over, done or not."""

    def request(self, request: Request) -> None:
        """A request was made."""


class _NullProgress:
    """A sink for whoever does not want to know."""

    def begin(self, what: str, steps: int) -> None:
        """Say nothing."""

    def advance(self, steps: int = 1) -> None:
        """Say nothing."""

    def end(self) -> None:
        """Say nothing."""

    def request(self, request: Request) -> None:
        """Say nothing."""


NULL_PROGRESS: Progress = _NullProgress()
