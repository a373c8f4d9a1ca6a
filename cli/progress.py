"""How long work is going, on standard error: a bar on a terminal, and with -v every request."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.estimators.base.progress import Request
from memfit.estimators.base.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_SECONDS = 0.5  # work that is over by then shows nothing
_WHOLE_DAY_SECONDS = 86_400.0


class TerminalSink:
    """A sink that shows a bar where someone watches, and requests to who asked for them."""

    def __init__(self, *, verbose: bool, meanwhile: Callable[[], object] | None = None) -> None:
        """Show nothing yet; ``meanwhile`` is called while the first work is waited for."""
        self._verbose, self._meanwhile = verbose, meanwhile
        self._watched = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._timer: threading.Timer | None = None
        self._bar: Progress | None = None
        self._what, self._steps, self._done = "", 0, 0
        self._requests = self._nbytes = 0

    def begin(self, what: str, steps: int) -> None:
        """Show a bar once the work has gone on for half a second, all of it counted."""
        with self._lock:
            now = time.monotonic()
            self._began = now if self._began is None else self._began
            self._what, self._steps, self._done = what, steps, 0
            if self._watched:
                self._timer = threading.Timer(self._began + QUIET_SECONDS - now, self._show)
                self._timer.daemon = True
                self._timer.start()
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile:
            meanwhile()

    def advance(self, steps: int = 1) -> None:
        """Move the bar."""
        with self._lock:
            self._done += steps
            if self._bar:
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def end(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            self._timer = None
            if self._bar:
                self._bar.stop()
            self._bar = None

    def request(self, request: Request) -> None:
        """Count a request; with -v say how it went."""
        with self._lock:
            self._requests += 1
            self._nbytes += request.nbytes
            status = "no answer" if request.status is None else str(request.status)
            self._say(
                f"GET {request.url}: {status}, {format_bytes(request.nbytes)},"
                f" {request.seconds:.2f} s"
            )

    def close(self) -> None:
        """With -v say what the requests came to."""
        with self._lock:
            noun = "request" if self._requests == 1 else "requests"
            self._say(f"{self._requests} {noun}, {format_bytes(self._nbytes)}")

    def _say(self, text: str) -> None:
        if not self._verbose:
            return
        if self._bar:
            self._bar.console.print(f"memfit: {text}", markup=False, highlight=False)
        else:
            print(f"memfit: {text}", file=sys.stderr)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        with self._lock:
            if self._timer is None:
                return
            self._bar = Progress(
                console=Console(stderr=True),
                transient=True,
                # Of all there was so far: one step of a long measurement may take minutes.
                speed_estimate_period=_WHOLE_DAY_SECONDS,
            )
            self._bar.add_task(self._what, total=self._steps, completed=self._done)
            self._bar.start()


@contextmanager
def reporting(
    *, verbose: bool, meanwhile: Callable[[], object] | None = None
) -> Iterator[TerminalSink]:
    """Give a sink that says at the end what there is to say."""
    progress = TerminalSink(verbose=verbose, meanwhile=meanwhile)
    try:
        yield progress
    finally:
        progress.end()
        progress.close()
