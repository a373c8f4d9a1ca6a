"""Show progress on standard error: a bar on a terminal, lines elsewhere, and with -v requests."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.cli.render.output import message, say
from memfit.estimators.base.progress import FinishedRequest
from memfit.estimators.base.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_SECONDS = 0.5  # shorter work shows no bar
PIPE_SECONDS = 5.0  # and where nobody watches no line; each line comes after twice the time
_WHOLE_DAY_SECONDS = 86_400.0


class TerminalProgress:
    """Progress with a bar on a terminal, and a line for each request when verbose."""

    def __init__(self, *, verbose: bool, while_waiting: Callable[[], object] | None = None) -> None:
        """Show nothing yet; ``while_waiting`` is called once, when the first work has started."""
        self._verbose, self._while_waiting = verbose, while_waiting
        self._watched = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._timer: threading.Timer | None = None
        self._bar: Progress | None = None
        self._what, self._steps, self._done = "", 0, 0
        self._requests = self._nbytes = 0

    def begin(self, what: str, steps: int) -> None:
        """Show a bar `QUIET_SECONDS` after the first work started; 0: the steps are not known."""
        with self._lock:
            now = time.monotonic()
            self._began = now if self._began is None else self._began
            self._what, self._steps, self._done = what, steps, 0
            quiet = QUIET_SECONDS if self._watched else PIPE_SECONDS
            self._start(self._began + quiet - now)
        while_waiting, self._while_waiting = self._while_waiting, None
        if while_waiting:
            while_waiting()

    def advance(self, steps: int = 1) -> None:
        """Move the bar."""
        with self._lock:
            self._done += steps
            if self._bar:
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def end(self) -> None:
        """Remove the bar."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            self._timer = None
            if self._bar:
                self._bar.stop()
            self._bar = None

    def request(self, request: FinishedRequest) -> None:
        """Count a request; with -v print its status, size and time."""
        with self._lock:
            self._requests += 1
            self._nbytes += request.nbytes
            status = "no answer" if request.status is None else str(request.status)
            self._say(
                f"GET {request.url}: {status}, {format_bytes(request.nbytes)},"
                f" {request.seconds:.2f} s"
            )

    def close(self) -> None:
        """With -v print the totals of all requests."""
        with self._lock:
            noun = "request" if self._requests == 1 else "requests"
            self._say(f"{self._requests} {noun}, {format_bytes(self._nbytes)}")

    def _start(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._show if self._watched else self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        with self._lock:
            if self._timer is None or self._began is None:
                return
            passed = time.monotonic() - self._began
            of = f", {self._done} of {self._steps}" if self._steps else ""
            say(f"{self._what}{of}, {passed:.0f} s so far")
            self._start(passed)

    def _say(self, text: str) -> None:
        if not self._verbose:
            return
        if self._bar:
            self._bar.console.print(message(text), markup=False, highlight=False)
        else:
            say(text)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        with self._lock:
            # rich takes long to import: the timer of the next work may have shown a bar by now.
            if self._timer is None or self._bar is not None:
                return
            self._bar = Progress(
                console=Console(stderr=True),
                transient=True,
                # Use all steps so far for the speed: one step of a measurement may take minutes.
                speed_estimate_period=_WHOLE_DAY_SECONDS,
            )
            self._bar.add_task(self._what, total=self._steps or None, completed=self._done)
            self._bar.start()


@contextmanager
def reporting(
    *, verbose: bool, while_waiting: Callable[[], object] | None = None
) -> Iterator[TerminalProgress]:
    """Yield a progress that removes its bar and prints its totals at the end."""
    progress = TerminalProgress(verbose=verbose, while_waiting=while_waiting)
    try:
        yield progress
    finally:
        progress.end()
        progress.close()
