"""Exceptions that do not come from the code they interrupt."""

import signal
from collections.abc import Iterator
from types import CodeType
from typing import Any


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether an exception was raised in a signal handler of the process.

    Python calls handlers between two instructions of the main thread, so that their exceptions
    appear in whatever code runs there.
    """
    codes = set(_handler_codes())
    traceback = error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _handler_codes() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # functools.partial
        for each in (handler, vars(type(handler)).get("__call__")):
            if isinstance(code := getattr(each, "__code__", None), CodeType):
                yield code
