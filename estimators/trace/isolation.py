"""A trace among other threads: one trace at a time, and what it changes is its own.

What a trace replaces in MLX's functions it replaces in its own copies (`libraries.PrivateLibrary`).
``mx.array`` cannot be copied, so a replaced method of it looks at who calls: the trace, or a thread
that uses MLX for itself and gets the method as it is. For the process change only, while a trace
runs: Python collects no cycles, and a thread that another thread starts in the same instant as a
trace starts its own reserves a stack of the same size.
"""

import gc
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from types import CodeType, MappingProxyType
from typing import Any

from memfit.estimators.trace.libraries import changed

_LOCK = RLock()
_STUBS: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar(
    "array methods", default=MappingProxyType({})
)

ANSWERS: dict[str, Callable[..., Any]] = {
    "item": lambda _: 0,
    "tolist": lambda array: _nested_zeros(array.shape),
    "__bool__": lambda _: False,
}
"""Methods of mx.array that compute, and what they return in a trace: zeros."""


@contextmanager
def tracing() -> Iterator[None]:
    """Run a trace in the block, after those of other threads; it computes no values."""
    with _LOCK, not_collecting(), array_stubs(ANSWERS):
        yield


@contextmanager
def array_stubs(stubs: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of mx.array inside the block, for callers in its context alone."""
    import mlx.core as mx

    # A context variable: a thread that is not part of the trace sees no stubs.
    token = _STUBS.set({**_STUBS.get(), **stubs})
    try:
        with changed(mx.array, {name: _by_caller(name, getattr(mx.array, name)) for name in stubs}):
            yield
    finally:
        _STUBS.reset(token)


def original(name: str) -> Callable[..., Any]:
    """Return a method of mx.array as MLX has it, replaced or not."""
    import mlx.core as mx

    method = getattr(mx.array, name)
    result: Callable[..., Any] = getattr(method, "original", method)
    return result


def _by_caller(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
    def method(array: Any, *given: Any) -> Any:
        # Looked up at each call, because the context of the caller decides.
        return _STUBS.get().get(name, before)(array, *given)

    method.original = getattr(before, "original", before)  # type: ignore[attr-defined]
    return method


def _nested_zeros(shape: tuple[int, ...]) -> Any:
    return [_nested_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


@contextmanager
def not_collecting() -> Iterator[None]:
    """Collect no cycles inside the block: a search takes as long as recording the graph."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
