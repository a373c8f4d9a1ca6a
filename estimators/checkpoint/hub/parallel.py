"""Jobs beside each other on threads that nobody waits for when the process ends.

Python joins the threads of its own pool at exit: an interrupt would wait for a silent server.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future


def start(jobs: Sequence[Callable[[], bytes]], most_threads: int) -> list[Future[bytes]]:
    """Start jobs in their order, and return their results to come; one can be cancelled."""
    futures: list[Future[bytes]] = [Future() for _ in jobs]
    waiting = deque(zip(jobs, futures, strict=True))
    for _ in range(min(most_threads, len(jobs))):
        threading.Thread(target=_work, args=(waiting,), daemon=True).start()
    return futures


def _work(waiting: deque[tuple[Callable[[], bytes], Future[bytes]]]) -> None:
    while waiting:
        try:
            job, future = waiting.popleft()
        except IndexError:  # another thread took the last
            return
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by result()
                future.set_exception(error)
