"""Parallel jobs on daemon threads, which do not delay the end of the process.

Python joins the threads of its executors at exit, so an interrupt would wait for a silent server.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def start(jobs: Sequence[Callable[[], Result]], most_threads: int) -> list[Future[Result]]:
    """Start jobs in order and return their futures, which can be cancelled."""
    futures: list[Future[Result]] = [Future() for _ in jobs]
    # popleft is atomic, so that threads share the queue without a lock.
    waiting = deque(zip(jobs, futures, strict=True))
    for _ in range(min(most_threads, len(jobs))):
        threading.Thread(target=_work, args=(waiting,), daemon=True).start()
    return futures


def _work(waiting: deque[tuple[Callable[[], Result], Future[Result]]]) -> None:
    while waiting:
        try:
            job, future = waiting.popleft()
        except IndexError:  # another thread took the last
            return
        # False for a job that was cancelled while it waited.
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by result()
                future.set_exception(error)
